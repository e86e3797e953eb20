#!/usr/bin/env bash
# check_client_library.sh <libmkclient.so> <bare_client.c> <include folder> <client_executor_test>: the library loads anywhere.
# Training jobs load their own gRPC, protobuf, abseil, fmt and oneDNN, so ours must bring none of them: not as a dependency, direct or
# indirect, and not as a dynamic symbol. It needs libc and libm, of glibc 2.34, and starts where there is nothing else. Without oneDNN
# only the CPU executor is missing, and the error says so.
set -eu
library=$1 bare_client=$2 include=$3 executor_test=$4
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

# -- what it needs ------------------------------------------------------------------------------------------------------------------
allowed='^(libc\.so\.6|libm\.so\.6|libpthread\.so\.0|libdl\.so\.2|ld-linux-[a-z0-9-]*\.so\.[0-9])$'
if readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE "$allowed"; then
  echo "$library needs the libraries above" >&2
  bad=1
fi
glibc_max=2.34
newest=$(objdump -T "$library" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -V | tail -1)
if [ -z "$newest" ] || [ "$(printf '%s\n' "$newest" $glibc_max | sort -V | tail -1)" != $glibc_max ]; then
  echo "$library needs glibc $newest; $glibc_max is allowed:" >&2
  objdump -T "$library" | grep "GLIBC_$newest" >&2
  bad=1
fi
if grep -E '^(fmt|std|__gnu_cxx)::|^(dnnl|omp|GOMP)_' <<<"$(nm -DC --defined-only "$library" | awk '{ $1 = $2 = ""; print substr($0, 3) }')"; then
  echo "$library offers the symbols above to others" >&2
  bad=1
fi

# -- where there is libc6 alone -----------------------------------------------------------------------------------------------------
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir "$root/lib"
cc -I "$include" "$bare_client" "$library" -o "$root/lib/bare_client"
loader=$(readelf -l "$root/lib/bare_client" | sed -n 's/.*program interpreter: \(.*\)\]/\1/p')
cp "$loader" "$root/lib/loader"
for name in libc.so.6 libm.so.6; do cp "$(ldd "$library" | awk -v name=$name '$1 == name { print $3 }')" "$root/lib/"; done
cp "$library" "$root/lib/$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')"
if unshare --user --map-root-user true 2>/dev/null; then
  said=$(unshare --user --map-root-user --root="$root" /lib/loader --library-path /lib /lib/bare_client 2>&1) || true
  echo "in a bare root: $said"
  grep -q "^[1-9][0-9]*: .*/nobody/listens.sock" <<<"$said" || bad=1
else
  echo "no user namespace is to be had here: not tried in a bare root"
fi

# -- beside other libraries ---------------------------------------------------------------------------------------------------------
# Whatever a process has loaded: all that the library takes from others is libc's.
if nm -D --undefined-only "$library" | awk '$1 == "U" && $2 !~ /@GLIBC_/ { print $2; found = 1 } END { exit !found }'; then
  echo "$library takes the symbols above from whoever has them" >&2
  bad=1
fi
others=$(ldconfig -p | awk '/lib(protobuf|fmt|grpc\+\+|absl_strings|stdc\+\+)\.so\.[0-9]/ && $NF !~ /lib32/ { print $NF }' | tr '\n' ' ')
cc -I "$include" "$bare_client" "$library" -Wl,-rpath,"$(dirname "$library")" -o "$root/beside"
said=$(LD_PRELOAD=$others "$root/beside" 2>&1) || true
echo "beside ${others:-nothing}: $said"
grep -q "^[1-9][0-9]*: .*/nobody/listens.sock" <<<"$said" || bad=1

# -- without oneDNN -----------------------------------------------------------------------------------------------------------------
if readelf -d "$executor_test" | grep -q 'NEEDED.*dnnl'; then
  echo "$executor_test brings oneDNN itself" >&2
  bad=1
fi
echo "no library" >"$root/libdnnl.so.2"
said=$(LD_LIBRARY_PATH=$root${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$executor_test" 2>&1) || true
grep -m1 'the CPU executor needs oneDNN 2, and libdnnl.so.2 is not to be had' <<<"$said" || {
  echo "without oneDNN, the CPU executor does not say so:" >&2
  tail -20 <<<"$said" >&2
  bad=1
}
exit $bad
