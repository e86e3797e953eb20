// As much of JSON Schema as mkctl's schema uses.
#pragma once

#include <nlohmann/json.hpp>
#include <regex>
#include <string>

namespace mk::daemon {

/// What of `value` is not as `wanted` says; empty: nothing. `schema` has the "$defs".
inline std::string json_trouble(const nlohmann::json& value, const nlohmann::json& wanted,
                                const nlohmann::json& schema, const std::string& at = "$") {
  if (wanted.is_null()) return at + ": there is no schema for this";
  if (wanted.contains("$ref")) {
    const std::string name =
        wanted["$ref"].get<std::string>().substr(std::string("#/$defs/").size());
    if (!schema["$defs"].contains(name)) return at + ": no definition " + name;
    return json_trouble(value, schema["$defs"][name], schema, at);
  }
  if (wanted.contains("allOf")) {
    for (const auto& one : wanted["allOf"]) {
      if (auto trouble = json_trouble(value, one, schema, at); !trouble.empty()) return trouble;
    }
  }
  if (wanted.contains("const") && value != wanted["const"]) return at + " is " + value.dump();
  if (wanted.contains("enum")) {
    bool known = false;
    for (const auto& one : wanted["enum"]) known = known || one == value;
    if (!known) return at + " is " + value.dump();
  }
  const auto is = [&](const std::string& type) {
    return (type == "object" && value.is_object()) || (type == "array" && value.is_array()) ||
           (type == "string" && value.is_string()) || (type == "boolean" && value.is_boolean()) ||
           (type == "integer" && value.is_number_integer()) ||
           (type == "number" && value.is_number()) || (type == "null" && value.is_null());
  };
  if (wanted.contains("type")) {
    const auto& types = wanted["type"];
    bool fits = types.is_string() && is(types);
    for (const auto& one : types.is_array() ? types : nlohmann::json::array()) fits |= is(one);
    if (!fits) return at + " is no " + types.dump() + ": " + value.dump().substr(0, 80);
  }
  if (wanted.contains("pattern") &&
      !std::regex_match(value.get<std::string>(),
                        std::regex(wanted["pattern"].get<std::string>()))) {
    return at + " is " + value.dump();
  }
  for (const auto& name : wanted.value("required", nlohmann::json::array())) {
    if (!value.contains(name.get<std::string>())) return at + " has no " + name.dump();
  }
  if (wanted.contains("properties")) {
    for (const auto& [name, one] : wanted["properties"].items()) {
      if (!value.contains(name)) continue;
      if (auto trouble = json_trouble(value[name], one, schema, at + "." + name);
          !trouble.empty()) {
        return trouble;
      }
    }
  }
  if (wanted.contains("items")) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      auto trouble =
          json_trouble(value[i], wanted["items"], schema, at + "[" + std::to_string(i) + "]");
      if (!trouble.empty()) return trouble;
    }
  }
  return "";
}

/// What `promised` says that `now` does not say any more. More may be there; of lists, in any
/// order.
inline std::string schema_trouble(const nlohmann::json& promised, const nlohmann::json& now,
                                  const std::string& at) {
  if (promised.type() != now.type()) return at + " has changed";
  if (promised.is_object()) {
    for (const auto& [name, one] : promised.items()) {
      if (!now.contains(name)) return at + "/" + name + " is gone";
      if (auto trouble = schema_trouble(one, now[name], at + "/" + name); !trouble.empty()) {
        return trouble;
      }
    }
    return "";
  }
  if (promised.is_array()) {
    for (const auto& one : promised) {
      bool found = false;
      for (const auto& other : now) found = found || schema_trouble(one, other, at).empty();
      if (!found) return at + " has no " + one.dump() + " any more";
    }
    return "";
  }
  return promised == now ? "" : at + " was " + promised.dump() + " and is " + now.dump();
}

}  // namespace mk::daemon
