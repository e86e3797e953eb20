#!/usr/bin/env bash
# check_client_library.sh <libmkclient.so>: training jobs load their own gRPC, protobuf and abseil, so ours must bring
# none of them: not as a dependency, direct or indirect, and not as a dynamic symbol.
set -eu
library=$1
banned='grpc|protobuf|absl|upb|libgpr'
bad=0
if readelf -d "$library" | grep -E 'NEEDED' | grep -E "$banned"; then
  echo "$library needs the libraries above" >&2
  bad=1
fi
if ldd "$library" | grep -E "$banned"; then
  echo "$library loads the libraries above" >&2
  bad=1
fi
symbols=$(readelf --dyn-syms --wide "$library" | awk 'NR > 3 { print $8 }' | c++filt)
[ -n "$symbols" ] || { echo "$library has no dynamic symbols: not the library we meant" >&2; exit 1; }
if grep -E '(grpc|google::protobuf|absl)(::|_)' <<<"$symbols"; then
  echo "$library has the dynamic symbols above" >&2
  bad=1
fi
exit $bad
