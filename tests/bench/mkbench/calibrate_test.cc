// From what was measured of a machine to its file.
#include "tests/bench/mkbench/calibrate.h"

#include <gtest/gtest.h>

#include "kernels/plan/accounted.h"
#include "kernels/plan/model.h"

namespace mk::bench {
namespace {

namespace plan = kernels::plan;

/// The measurements that a machine predicts of itself.
GpuMeasured as_predicted(const plan::Machine& machine) {
  GpuMeasured measured;
  measured.name = machine.name;
  measured.sms = machine.sms;
  const auto product = [&](std::uint32_t columns) {
    const double tile = plan::tile_us(machine, {128, columns}, 4096 / 64, 2.0 * 8192 * 4096);
    return plan::product_us(machine, 64.0 * 8192 / columns, tile, machine.sms, columns);
  };
  measured.product_us_256 = product(256);
  measured.product_us_128 = product(128);
  measured.product_us_64 = product(64);
  plan::Problem ring;
  ring.op = plan::Op::kRing;
  ring.shape = {8192, 32, 128};
  plan::Candidate candidate;
  candidate.compute_blocks = machine.sms;
  measured.attention_us = plan::predict(ring, machine, candidate).compute;
  measured.memory_gb_s = machine.hbm_gb_s;
  measured.peer_gb_s = machine.engine_gb_s;
  return measured;
}

void expect_close(const plan::Machine& machine, const plan::Machine& expected) {
  for (double plan::Machine::*number :
       {&plan::Machine::step_us_256, &plan::Machine::step_us_128, &plan::Machine::step_us_64,
        &plan::Machine::tile_us_256, &plan::Machine::attention_share, &plan::Machine::hbm_gb_s,
        &plan::Machine::weights_gb_s, &plan::Machine::weights_sm_gb_s, &plan::Machine::link_gb_s,
        &plan::Machine::engine_gb_s}) {
    EXPECT_NEAR(machine.*number, expected.*number, 0.02 * expected.*number);
  }
}

TEST(Calibrate, AMachineThatDoesWhatItsFileSaysKeepsIt) {
  for (const char* name : {"H100", "H200"}) {
    const plan::Machine machine = plan::shipped_machine(name).value();
    expect_close(calibrated(machine, as_predicted(machine)), machine);
  }
}

// Another GPU: from the shipped file's numbers to its own, but for what nobody measures.
TEST(Calibrate, AnotherMachineIsFound) {
  const plan::Machine like = plan::shipped_machine("H100").value();
  plan::Machine real = like;
  real.step_us_256 *= 1.5;
  real.tile_us_256 *= 1.5;
  real.step_us_128 *= 1.3;
  real.tile_us_128 *= 1.3;
  real.step_us_64 *= 1.3;
  real.attention_share *= 0.8;
  real.hbm_gb_s *= 0.5;
  real.weights_gb_s *= 0.5;
  real.weights_sm_gb_s *= 0.5;
  for (double plan::Machine::*rate : {&plan::Machine::link_gb_s, &plan::Machine::rows_link_gb_s,
                                      &plan::Machine::sums_link_gb_s, &plan::Machine::engine_gb_s})
    real.*rate *= 0.25;
  const plan::Machine found = calibrated(like, as_predicted(real));
  expect_close(found, real);
}

TEST(Calibrate, WhatWasNotMeasuredStays) {
  const plan::Machine gpu = plan::shipped_machine("H200").value();
  EXPECT_EQ(calibrated(gpu, GpuMeasured{}), gpu);
  const plan::Machine cpu = plan::shipped_machine("CPU").value();
  EXPECT_EQ(calibrated(cpu, CpuMeasured{}), cpu);
  CpuMeasured measured;
  measured.gflops = 7;
  const plan::Machine slow = calibrated(cpu, measured);
  EXPECT_EQ(slow.cpu_gflops, 7);
  EXPECT_EQ(slow.cpu_memory_gb_s, cpu.cpu_memory_gb_s);
}

// 4 MB at 1 GB/s, 20 µs a command and 70 a step, beside 100 µs of computation.
TEST(Calibrate, CommandsAreFoundFromFewAndManyOfThem) {
  const auto run = [](double commands) {
    CommandRun made;
    made.bytes = 4e6;
    made.commands = commands;
    made.compute_us = 100;
    const double network = 4000 + 20 * commands;
    made.unfused_us = 100 + network;
    made.fused_us = network + 100 / commands + 70 * commands;
    return made;
  };
  const CommandsMeasured measured = commands_of(run(5), run(129), 64);
  EXPECT_NEAR(measured.command_us, 20, 1e-9);
  EXPECT_NEAR(measured.step_us, 70, 0.5);
  EXPECT_NEAR(measured.network_gb_s, 1, 1e-9);
  const plan::Machine like = plan::shipped_machine("CPU").value();
  plan::Machine machine = calibrated(like, measured);
  EXPECT_EQ(machine.cpu_command_us, measured.command_us);
  EXPECT_EQ(machine.cpu_step_us, measured.step_us);
  EXPECT_EQ(machine.network_gb_s, measured.network_gb_s);
  EXPECT_EQ(machine.cpu_step_in_turns_us, like.cpu_step_in_turns_us);
  // Few cores: they take turns.
  machine = calibrated(like, commands_of(run(5), run(129), 2));
  EXPECT_EQ(machine.cpu_step_in_turns_us, measured.step_us);
  EXPECT_EQ(machine.cpu_network_in_turns_gb_s, measured.network_gb_s);
  EXPECT_EQ(machine.cpu_step_us, like.cpu_step_us);
  // Lost in the noise: the file's numbers stay.
  CommandRun quick = run(129);
  quick.fused_us = quick.unfused_us = 1;
  EXPECT_EQ(calibrated(like, commands_of(run(5), quick, 64)).cpu_command_us, like.cpu_command_us);
  EXPECT_EQ(calibrated(like, commands_of(run(5), run(5), 64)), like);
}

}  // namespace
}  // namespace mk::bench
