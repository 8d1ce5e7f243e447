#pragma once
/// Runs the scenarios that the command line names: `simulation [SCENARIO] [--seed N] [--count N] [--verbose]`.
int run_scenarios(int argc, char** argv);
