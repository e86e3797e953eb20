// What a daemon is and has, at one look.
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"
#include "daemon/service/version.h"

namespace mk::mkctl {
namespace {

using Stub = v1::Admin::Stub;

Answer status(Daemon& daemon) {
  v1::GetStatusResponse response;
  const auto done = daemon.ask(&Stub::GetStatus, v1::GetStatusRequest(), response);
  if (!done.ok()) return daemon.explain(done);
  return answer_of(
      response, render(response),
      response.health() == v1::GetStatusResponse::HEALTH_OK ? kExitOk : kExitUnhealthy);
}

Answer version(Daemon& daemon) {
  v1::GetVersionResponse response;
  const auto done = daemon.ask(&Stub::GetVersion, v1::GetVersionRequest(), response);
  if (!done.ok()) return daemon.explain(done);
  return answer_of(response, render(response, daemon::version_text()));
}

template <class Request, class Response, class Method>
void add_list(Commands& commands, const std::string& noun, Method method) {
  commands.add(noun + " list", "List all " + noun + "s", [method](Fleet& fleet) {
    return fleet.each([method](Daemon& daemon) {
      Response response;
      const auto done = daemon.ask(method, Request(), response);
      return done.ok() ? answer_of(response, render(response)) : daemon.explain(done);
    });
  });
}

}  // namespace

void declare_list_commands(Commands& commands) {
  commands.add("status", "Health, peers, and what is wrong",
               [](Fleet& fleet) { return fleet.each(status); });
  commands.add("version", "Versions of the daemon and of mkctl",
               [](Fleet& fleet) { return fleet.each(version); });
  add_list<v1::ListSessionsRequest, v1::ListSessionsResponse>(commands, "session",
                                                              &Stub::ListSessions);
  add_list<v1::ListJobsRequest, v1::ListJobsResponse>(commands, "job", &Stub::ListJobs);
  add_list<v1::ListQueuesRequest, v1::ListQueuesResponse>(commands, "queue", &Stub::ListQueues);
  add_list<v1::ListLinksRequest, v1::ListLinksResponse>(commands, "link", &Stub::ListLinks);
}

}  // namespace mk::mkctl
