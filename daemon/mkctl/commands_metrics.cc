// What Prometheus would be told, without Prometheus.
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"

namespace mk::mkctl {
namespace {

Answer metrics(Daemon& daemon) {
  grpc::ClientContext context;
  context.set_deadline(Daemon::deadline(daemon.timeout()));
  v1::WatchMetricsRequest request;
  request.set_samples(1);
  const auto reader = daemon.stub().WatchMetrics(&context, request);
  v1::MetricsSample sample;
  const bool got = reader->Read(&sample);
  v1::MetricsSample none;
  while (reader->Read(&none)) {
  }
  const grpc::Status done = reader->Finish();
  if (!got || !done.ok()) return daemon.explain(done);
  return answer_of(sample, render(sample));
}

}  // namespace

void declare_metrics_command(Commands& commands) {
  commands.add("metrics", "All metrics, in Prometheus' text format",
               [](Fleet& fleet) { return fleet.each(metrics); });
}

}  // namespace mk::mkctl
