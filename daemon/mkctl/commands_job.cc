// One job: what it is doing, and its end.
#include <fmt/format.h>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

using Stub = v1::Admin::Stub;

/// Everything about the newest job of that name.
Answer show(Daemon& daemon, const std::string& name) {
  v1::ListJobsResponse jobs;
  v1::ListSessionsResponse sessions;
  v1::ListQueuesResponse queues;
  auto done = daemon.ask(&Stub::ListJobs, v1::ListJobsRequest(), jobs);
  if (done.ok()) done = daemon.ask(&Stub::ListSessions, v1::ListSessionsRequest(), sessions);
  if (done.ok()) done = daemon.ask(&Stub::ListQueues, v1::ListQueuesRequest(), queues);
  if (!done.ok()) return daemon.explain(done);
  v1::ListJobsResponse found;
  for (const v1::Job& job : jobs.jobs()) {
    if (job.job() == name) *found.add_jobs() = job;
  }
  for (const v1::EndedJob& job : jobs.ended()) {
    if (job.job() == name) *found.add_ended() = job;
  }
  v1::ListSessionsResponse ranks;
  for (const v1::Session& one : sessions.sessions()) {
    if (one.job() == name) *ranks.add_sessions() = one;
  }
  for (const v1::Session& one : sessions.recent_failures()) {
    if (one.job() == name) *ranks.add_recent_failures() = one;
  }
  v1::ListQueuesResponse rings;
  for (const v1::Queue& one : queues.queues()) {
    if (one.job() == name) *rings.add_queues() = one;
  }
  if (found.jobs_size() == 0 && found.ended_size() == 0 && ranks.recent_failures_size() == 0) {
    return error_answer(kExitUnhealthy, fmt::format("no job '{}' at {}", name, daemon.name()));
  }
  Json json = json_of(found);
  json.update(json_of(ranks));
  json.update(json_of(rings));
  std::string text = render(found);
  if (ranks.sessions_size() > 0) text += "\n" + sessions_table(ranks.sessions());
  if (rings.queues_size() > 0) text += "\n" + queues_table(rings.queues());
  if (ranks.recent_failures_size() > 0) {
    text += "\nended with an error:\n" + sessions_table(ranks.recent_failures());
  }
  return {kExitOk, text, json, ""};
}

Answer terminate(Daemon& daemon, const std::string& name, const std::string& reason) {
  v1::TerminateJobRequest request;
  request.set_job(name);
  request.set_reason(reason);
  v1::TerminateJobResponse response;
  const auto done = daemon.ask(&Stub::TerminateJob, request, response);
  if (!done.ok()) return daemon.explain(done);
  return answer_of(response,
                   fmt::format("job '{}' is terminated: {} ranks here, and its other nodes "
                               "are told\n",
                               printable(name), response.sessions()));
}

}  // namespace

void declare_job_commands(Commands& commands) {
  const auto name = std::make_shared<std::string>();
  const auto reason = std::make_shared<std::string>();
  commands
      .add("job show", "A job's ranks, their rings, and what it waits for",
           [name](Fleet& fleet) {
             return fleet.each([&](Daemon& daemon) { return show(daemon, *name); });
           })
      .option("JOB", *name, "Its name")
      .required();
  Command end = commands.add("job terminate", "End a job on all its nodes", [=](Fleet& fleet) {
    return fleet.each([&](Daemon& daemon) { return terminate(daemon, *name, *reason); });
  });
  end.option("JOB", *name, "Its name").required();
  end.option("--reason", *reason, "Why, for the job's error message");
}

}  // namespace mk::mkctl
