// Handwritten digits in memory: MNIST's files where the user has them, else the UCI digits that ship with Cohort.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cstdint>
#include <filesystem>
#include <vector>

struct Digits {
  at::Tensor images;     ///< [n, 1, 28, 28], float
  at::Tensor labels;     ///< [n], int64, 0 to 9
  float background = 0;  ///< the value of empty paper

  int64_t size() const { return labels.size(0); }
  Digits to(const at::Device& device) const { return {images.to(device), labels.to(device), background}; }
  /// The samples of these numbers.
  Digits select(const std::vector<int64_t>& indices) const;
  /// The same, each image moved by up to `farthest` pixels in both directions. How far depends on the image's number,
  /// the seed and the epoch alone, so that any number of processes sees the same images.
  Digits shifted(const std::vector<int64_t>& indices, uint64_t seed, int64_t epoch, int64_t farthest) const;
};

struct DigitSets {
  Digits train, test;
};

/// Reads `train-` and `t10k-` `images-idx3-ubyte` and `labels-idx1-ubyte` (or the same with `.gz`) from `folder`.
/// Images of another size are scaled to 28x28; all are normalised with the mean and deviation of the training images.
/// Throws cohort::Error, naming the file, if one is missing or damaged.
DigitSets load_digits(const std::filesystem::path& folder);

/// The folder of the shipped digits: beside the sources, or installed beside the program (../share/cohort/digits).
std::filesystem::path shipped_digits();
