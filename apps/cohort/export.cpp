#include "formats/export.h"
#include "commands.h"

#include <fmt/core.h>

#include <map>
#include <memory>

namespace cohort::app {

void add_export(CLI::App& app, int&) {
  struct Arguments {
    formats::ExportOptions options;
    bool everything = false;
    std::string torch = "2";
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("export", "Make a .pt for Python's torch.load, or a .safetensors, from a checkpoint");
  command
      ->add_option("FROM", arguments->options.from,
                   "A checkpoint, a folder of them (its newest), a .safetensors or a .pt")
      ->required();
  command->add_option("TO", arguments->options.to, "The file to write: *.pt or *.safetensors")->required();
  command->add_option("--key", arguments->options.key,
                      "In a .pt: the key under which the weights are, e.g. model or a/b");
  command->add_flag("--everything", arguments->everything,
                    "Not the weights alone: optimizer, step, epoch, sampler, too (.pt only)");
  command->add_option("--torch", arguments->torch, "Oldest torch that is to load it: 1.13 gets floats as tensors")
      ->check(CLI::IsMember({"1.13", "2"}))
      ->capture_default_str();
  command->callback([arguments] {
    formats::ExportOptions& options = arguments->options;
    if (arguments->everything) options.content = formats::ExportContent::Everything;
    if (arguments->torch == "1.13") options.floats = formats::PtFloats::Tensor;
    const formats::ExportSummary summary = value_or_throw(formats::export_weights(options));
    fmt::print("{}: {} tensors, {} bytes of weights, from {}\n", options.to, summary.tensors, summary.bytes,
               summary.from);
  });
}

}  // namespace cohort::app
