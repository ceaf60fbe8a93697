#include "ledger.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace stand_in::ledger {

namespace {

std::string path(const std::string& name) {
  const char* folder = std::getenv("CUDA_STAND_IN");
  if (folder == nullptr) {
    std::fputs("CUDA_STAND_IN has to name a folder\n", stderr);
    std::abort();
  }
  return std::string(folder) + "/" + name;
}

std::string name_of(unsigned pid, int device) {
  return std::to_string(pid) + "-" + std::to_string(device);
}

}  // namespace

int device_count() {
  const char* count = std::getenv("CUDA_STAND_IN_DEVICES");
  return count == nullptr ? 1 : std::atoi(count);
}

void open_driver() {
  // Never closed: a process that has initialised the driver has it open until its end.
  open(path("nvidia-uvm").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

void write(int device, std::size_t bytes) {
  const std::string name = path(name_of(getpid(), device));
  const int file = open(name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  // Eight bytes in one write: a reader sees the old value or the new one.
  if (file < 0 || ::write(file, &bytes, sizeof bytes) != sizeof bytes) {
    std::perror(name.c_str());
    std::abort();
  }
  close(file);
}

void clear() {
  for (int device = 0; device < device_count(); ++device) {
    unlink(path(name_of(getpid(), device)).c_str());
  }
}

std::vector<Entry> read(int device) {
  std::vector<Entry> found;
  DIR* folder = opendir(path("").c_str());
  if (folder == nullptr) return found;
  while (const dirent* file = readdir(folder)) {
    unsigned pid = 0;
    int of = 0;
    if (std::sscanf(file->d_name, "%u-%d", &pid, &of) != 2 || of != device) continue;
    // One that was killed has left its file: the driver has taken everything back.
    if (kill(static_cast<pid_t>(pid), 0) != 0) continue;
    std::size_t bytes = 0;
    const int opened = open(path(file->d_name).c_str(), O_RDONLY | O_CLOEXEC);
    if (opened >= 0 && ::read(opened, &bytes, sizeof bytes) == sizeof bytes) {
      found.push_back({pid, bytes});
    }
    if (opened >= 0) close(opened);
  }
  closedir(folder);
  return found;
}

std::size_t used(int device) {
  std::size_t bytes = RESERVED;
  for (const Entry& entry : read(device)) bytes += entry.bytes;
  return bytes;
}

}  // namespace stand_in::ledger
