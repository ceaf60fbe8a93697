// What each process holds of each device: a folder with a file for each, which all of them read.
#pragma once

#include <cstddef>
#include <vector>

namespace stand_in::ledger {

constexpr std::size_t MIB = std::size_t{1} << 20;
constexpr std::size_t CAPACITY = 40960 * MIB;  // Of one device,
constexpr std::size_t RESERVED = 600 * MIB;    // of which the driver keeps this for itself,
constexpr std::size_t CONTEXT = 500 * MIB;     // and a context of one process costs this.

struct Entry {
  unsigned pid;
  std::size_t bytes;
};

// As CUDA_STAND_IN_DEVICES says; one without it.
int device_count();

// Keep a file named "nvidia-uvm" open, as whoever has initialised the driver does.
void open_driver();

// Note what this process holds of a device, its context included.
void write(int device, std::size_t bytes);

// Forget this process, at its end.
void clear();

// The processes that live, and what they hold of a device.
std::vector<Entry> read(int device);

// What all of them and the driver hold of a device.
std::size_t used(int device);

}  // namespace stand_in::ledger
