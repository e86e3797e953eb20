#include "daemon/mkctl/json.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cctype>

namespace mk::mkctl {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
Json object(const Message& message);

/// One value of a field; `index` is used when it is repeated.
Json scalar(const Message& m, const FieldDescriptor& f, int index) {
  const Reflection& r = *m.GetReflection();
  const bool many = f.is_repeated();
  switch (f.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return many ? r.GetRepeatedInt32(m, &f, index) : r.GetInt32(m, &f);
    case FieldDescriptor::CPPTYPE_INT64:
      return many ? r.GetRepeatedInt64(m, &f, index) : r.GetInt64(m, &f);
    case FieldDescriptor::CPPTYPE_UINT32:
      return many ? r.GetRepeatedUInt32(m, &f, index) : r.GetUInt32(m, &f);
    case FieldDescriptor::CPPTYPE_UINT64: {
      const std::uint64_t value = many ? r.GetRepeatedUInt64(m, &f, index) : r.GetUInt64(m, &f);
      if (f.type() == FieldDescriptor::TYPE_FIXED64) return fmt::format("{:016x}", value);
      return value;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return many ? r.GetRepeatedDouble(m, &f, index) : r.GetDouble(m, &f);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return many ? r.GetRepeatedFloat(m, &f, index) : r.GetFloat(m, &f);
    case FieldDescriptor::CPPTYPE_BOOL:
      return many ? r.GetRepeatedBool(m, &f, index) : r.GetBool(m, &f);
    case FieldDescriptor::CPPTYPE_ENUM:
      return json_name(many ? *r.GetRepeatedEnum(m, &f, index) : *r.GetEnum(m, &f));
    case FieldDescriptor::CPPTYPE_STRING:
      return many ? r.GetRepeatedString(m, &f, index) : r.GetString(m, &f);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return object(many ? r.GetRepeatedMessage(m, &f, index) : r.GetMessage(m, &f));
  }
  return nullptr;
}

Json object(const Message& message) {
  Json out = Json::object();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (!field.is_repeated()) {
      out[field.name()] = scalar(message, field, 0);
      continue;
    }
    Json list = Json::array();
    const int size = message.GetReflection()->FieldSize(message, &field);
    for (int index = 0; index < size; ++index) list.push_back(scalar(message, field, index));
    out[field.name()] = std::move(list);
  }
  return out;
}

}  // namespace

std::string json_name(const google::protobuf::EnumValueDescriptor& value) {
  std::string prefix;
  for (const char c : value.type()->name()) {
    if (std::isupper(static_cast<unsigned char>(c)) && !prefix.empty()) prefix += '_';
    prefix += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  prefix += '_';
  std::string name = value.name();
  if (name.starts_with(prefix)) name.erase(0, prefix.size());
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

Json json_of(const Message& message) { return object(message); }

std::string text_of(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::string to_json(const Message& message, int indent) { return text_of(object(message), indent); }

}  // namespace mk::mkctl
