/// \file
/// A machine of machine_xml.h's, as hwloc reads it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <stdexcept>

#include "daemon/topology/machine.h"
#include "tests/daemon/topology/machine_xml.h"

namespace mk::topology {

inline Machine machine_of(const std::string& xml) {
  const std::string path = testing::TempDir() + fmt::format("machine-{}.xml", ::getpid());
  std::ofstream(path) << xml;
  auto machine = read_machine(path);
  ::unlink(path.c_str());
  if (!machine) throw std::runtime_error(machine.error().message);
  return std::move(*machine);
}

}  // namespace mk::topology
