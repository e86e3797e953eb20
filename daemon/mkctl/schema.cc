#include "daemon/mkctl/schema.h"

#include <google/protobuf/descriptor.h>

#include "daemon/mkctl/answer.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::mkctl {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
namespace v1 = ::mkernel::v1;

/// The name of a message in "$defs": without the package.
std::string name_of(const Descriptor& type) {
  const std::string package = type.file()->package() + ".";
  return type.full_name().substr(package.size());
}

Json scalar(const FieldDescriptor& field, Json& definitions);

void define(const Descriptor& type, Json& definitions) {
  if (definitions.contains(name_of(type))) return;
  definitions[name_of(type)] = nullptr;  // messages may hold themselves
  Json properties = Json::object(), required = Json::array();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const Json one = scalar(field, definitions);
    properties[field.name()] = field.is_repeated() ? Json{{"type", "array"}, {"items", one}} : one;
    required.push_back(field.name());
  }
  definitions[name_of(type)] = {
      {"type", "object"}, {"properties", properties}, {"required", required}};
}

Json scalar(const FieldDescriptor& field, Json& definitions) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return {{"type", "string"}};
    case FieldDescriptor::CPPTYPE_BOOL:
      return {{"type", "boolean"}};
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      return {{"type", "number"}};
    case FieldDescriptor::CPPTYPE_ENUM: {
      Json names = Json::array();
      for (int i = 0; i < field.enum_type()->value_count(); ++i) {
        names.push_back(json_name(*field.enum_type()->value(i)));
      }
      return {{"enum", names}};
    }
    case FieldDescriptor::CPPTYPE_MESSAGE:
      define(*field.message_type(), definitions);
      return {{"$ref", "#/$defs/" + name_of(*field.message_type())}};
    default:
      if (field.type() == FieldDescriptor::TYPE_FIXED64) {
        return {{"type", "string"}, {"pattern", "^[0-9a-f]{16}$"}};
      }
      return {{"type", "integer"}};
  }
}

struct Printed {
  const char* command;
  std::vector<const Descriptor*> messages;  ///< their fields side by side
};

/// Every field with its schema, or with the name of its type ("integer?" may be null).
Json object_of(std::initializer_list<std::pair<const char*, Json>> fields) {
  Json properties = Json::object(), required = Json::array();
  for (const auto& [name, what] : fields) {
    Json& property = properties[name] = what;
    required.push_back(name);
    if (!what.is_string()) continue;
    const auto type = what.get<std::string>();
    property = type.back() != '?'
                   ? Json{{"type", type}}
                   : Json{{"type", Json::array({type.substr(0, type.size() - 1), "null"})}};
  }
  return {{"type", "object"}, {"properties", properties}, {"required", required}};
}

Json list_of(Json items) { return {{"type", "array"}, {"items", std::move(items)}}; }

/// Of a definition.
Json reference(const std::string& name) { return {{"$ref", "#/$defs/" + name}}; }

/// What mkctl says of this machine (daemon/topology/draw.cc, daemon/doctor/report.cc).
Json topology() {
  const Json text = {{"type", "string"}};
  return object_of(
      {{"machine", "string"},
       {"gpus",
        list_of(object_of({{"bus_id", "string"}, {"model", "string"}, {"numa", "integer?"}}))},
       {"nics", list_of(object_of({{"bus_id", "string"},
                                   {"model", "string"},
                                   {"numa", "integer?"},
                                   {"name", "string"},
                                   {"rdma", "string"},
                                   {"interface", "string"},
                                   {"efa", "boolean"},
                                   {"active", "boolean"}}))},
       {"rails",
        list_of(object_of({{"nics", list_of(text)}, {"why", "string"}, {"gpu", "string?"}}))},
       {"configured", list_of(object_of({{"gpu", "string"}, {"rail", "integer"}}))},
       {"ranks", list_of(object_of({{"job", "string"},
                                    {"rank", "integer"},
                                    {"rail", "integer"},
                                    {"gpu", "string"},
                                    {"cpus", "string"},
                                    {"why", "string"}}))}});
}

Json doctor() {
  const Json result = {{"enum", {"PASS", "WARN", "FAIL", "SKIP"}}};
  return object_of(
      {{"checks",
        list_of(object_of(
            {{"id", "string"}, {"result", result}, {"evidence", "string"}, {"fix", "string"}}))},
       {"summary", object_of({{"pass", "integer"},
                              {"warn", "integer"},
                              {"fail", "integer"},
                              {"skip", "integer"}})}});
}

}  // namespace

Json json_schema() {
  Json definitions = Json::object(), commands = Json::object();
  const std::vector<Printed> printed{
      {"version", {v1::GetVersionResponse::descriptor()}},
      {"status", {v1::GetStatusResponse::descriptor()}},
      {"session list", {v1::ListSessionsResponse::descriptor()}},
      {"job list", {v1::ListJobsResponse::descriptor()}},
      {"job show",
       {v1::ListJobsResponse::descriptor(), v1::ListSessionsResponse::descriptor(),
        v1::ListQueuesResponse::descriptor()}},
      {"job terminate", {v1::TerminateJobResponse::descriptor()}},
      {"job set", {v1::SetJobResponse::descriptor()}},
      {"queue list", {v1::ListQueuesResponse::descriptor()}},
      {"link list", {v1::ListLinksResponse::descriptor()}},
      {"link show", {v1::ListLinksResponse::descriptor()}},
      {"config show", {v1::GetConfigResponse::descriptor()}},
      {"config diff", {v1::GetConfigResponse::descriptor()}},
      {"drain", {v1::DrainResponse::descriptor()}},
      {"resume", {v1::ResumeResponse::descriptor()}},
      {"ready", {v1::GetStatusResponse::descriptor()}},
      {"stats", {v1::StatsSample::descriptor()}},
      {"metrics", {v1::MetricsSample::descriptor()}},
  };
  for (const Printed& one : printed) {
    Json parts = Json::array({{{"$ref", "#/$defs/Envelope"}}});
    for (const Descriptor* message : one.messages) {
      define(*message, definitions);
      parts.push_back({{"$ref", "#/$defs/" + name_of(*message)}});
    }
    commands[one.command] = {{"allOf", parts}};
  }
  define(*v1::PeerStatus::descriptor(), definitions);
  commands["link show"]["allOf"].push_back(
      {{"type", "object"},
       {"properties",
        {{"peers", {{"type", "array"}, {"items", {{"$ref", "#/$defs/PeerStatus"}}}}}}},
       {"required", {"peers"}}});
  definitions["Envelope"] = {
      {"type", "object"},
      {"properties",
       {{"schema_version", {{"const", kSchemaVersion}}}, {"command", {{"type", "string"}}}}},
      {"required", {"schema_version", "command"}}};
  definitions["Finding"] = object_of({{"kind", "string"},
                                      {"job", "string"},
                                      {"who", "string"},
                                      {"why", "string"},
                                      {"rank", "integer"},
                                      {"node", "integer"},
                                      {"for_ns", "integer"}});
  definitions["Motion"] = object_of({{"job", "string"},
                                     {"world", "integer"},
                                     {"ranks_seen", "integer"},
                                     {"launches_per_second", "number"},
                                     {"commands_per_second", "number"},
                                     {"idle", "boolean"}});
  const auto own = [&](const char* command, Json body) {
    commands[command] = {{"allOf", Json::array({{{"$ref", "#/$defs/Envelope"}}, std::move(body)})}};
  };
  own("who-is-slow", object_of({{"findings", list_of(reference("Finding"))},
                                {"jobs", list_of(reference("Motion"))}}));
  own("topology", topology());
  own("doctor", doctor());
  own("trace record", object_of({{"file", "string"},
                                 {"writes", "integer"},
                                 {"failed", "integer"},
                                 {"unfinished", "integer"},
                                 {"submissions", "integer"},
                                 {"arrivals", "integer"},
                                 {"dropped", "integer"}}));
  own("bundle", object_of({{"file", "string"}, {"bytes", "integer"}, {"daemons", "integer"}}));
  own("top", object_of({{"hosts", "integer"},
                        {"answering", "integer"},
                        {"sessions", "integer"},
                        {"bytes_per_second", "number"},
                        {"commands_per_second", "number"},
                        {"troubles", "array"},
                        {"links", "array"},
                        {"queues", "array"},
                        {"jobs", "array"}}));
  // With --hosts, of every command that asks each daemon by itself; "answer" is what it prints for
  // one, null when there was only an error.
  definitions["Hosts"] = {
      {"type", "object"},
      {"properties",
       {{"hosts",
         {{"type", "array"},
          {"items",
           object_of({{"host", "string"}, {"exit_status", "integer"}, {"error", "string"}})}}}}},
      {"required", {"hosts"}}};
  return {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
          {"title", "mkctl --json"},
          {"schema_version", kSchemaVersion},
          {"commands", commands},
          {"$defs", definitions}};
}

}  // namespace mk::mkctl
