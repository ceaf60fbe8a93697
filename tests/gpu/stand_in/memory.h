// Memory of a device: files without a name, which other processes can map, too.
#pragma once

#include <cstddef>
#include <memory>

namespace stand_in {

// So much of a device's memory, counted until it is destroyed.
class Physical {
 public:
  // Null if the device has not so much left.
  static std::shared_ptr<Physical> allocate(int device, std::size_t bytes);
  ~Physical();
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  const int device;
  const std::size_t bytes;
  const int file;

 private:
  Physical(int on, std::size_t size, int opened) : device(on), bytes(size), file(opened) {}
};

// Map it, at an address if one is given; null if the system refuses.
char* map(const std::shared_ptr<Physical>& memory, void* address = nullptr);

// Unmap what `map` has mapped there, and return it; null if there is nothing.
std::shared_ptr<Physical> unmap(void* address);

bool is_on_device(const void* address);
int device_of(const void* address);  // -1 for what is on none.

// Sizes are rounded up to this, as those of a driver.
constexpr std::size_t GRANULARITY = std::size_t{2} << 20;

}  // namespace stand_in
