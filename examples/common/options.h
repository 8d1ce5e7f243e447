// The program's command-line options.
#pragma once

#include <cohort/dtype.h>

#include <cstdint>
#include <filesystem>
#include <string>

struct Options {
  std::filesystem::path data;  ///< empty: the shipped digits
  std::filesystem::path out;   ///< folder for record, checkpoints and weights
  int64_t epochs = 10;
  int64_t batch_per_process = 0;
  bool batch_grows = false;  ///< the global batch, and with it the learning rate, grows with the processes
  double lr = 0.03;
  uint64_t seed = 1;
  int64_t shift = 2;           ///< training images are moved by up to this many pixels, anew in each epoch
  int threads = 0;             ///< 0: as OMP_NUM_THREADS says
  std::string device = "cpu";  ///< "cuda": the GPU of the process's local rank
  int64_t local_steps = 0;     ///< steps from one average of parameters to the next; 0: gradients are, in every step
  int64_t delay = 0;           ///< steps that such an average travels
  cohort::WireFormat wire_format = cohort::WireFormat::None;  ///< of gradients, or averages, between hosts
  bool resume = false;
  int64_t save_every = 0;  ///< steps from one checkpoint to the next within an epoch; 0: at its end only
};

/// Exits the program after --help or a mistake, which it prints on rank 0. Throws cohort::Error if the batch cannot be
/// spread over `world_size` processes.
Options parse_options(int argc, char** argv, int rank, int world_size);
