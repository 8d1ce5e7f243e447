// A worker of an elastic job that forms the world of each of its epochs, on a thread of its own, and otherwise does
// what files say: end.NUMBER, fail.NUMBER, kill.NUMBER; while there is busy.NUMBER it stays in its world.
#include "rendezvous/epochs.h"
#include "telemetry/status_page.h"

#include <cohort/error.h>
#include <cohort/init.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

int main() {
  const std::string number = std::getenv("COHORT_WORKER");
  std::printf("worker %s came, local rank %s\n", number.c_str(), std::getenv("LOCAL_RANK"));
  std::fflush(stdout);
  const auto told = [number](const char* what) { return ::access((what + ("." + number)).c_str(), F_OK) == 0; };
  std::thread([told] {
    try {
      while (true) {
        const cohort::Communicator communicator = cohort::init();
        while (cohort::status::StatusPage::own().announced_epoch() <= cohort::rendezvous::formed_epoch() ||
               told("busy"))
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    } catch (const cohort::Error&) {  // the test says when it ends
    }
  }).detach();
  std::ofstream("ready." + number) << "now";
  while (true) {
    if (told("end")) ::_exit(0);
    if (told("fail")) ::_exit(5);
    if (told("kill")) std::raise(SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}
