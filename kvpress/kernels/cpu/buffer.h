// SPDX-License-Identifier: Apache-2.0
// Scratch memory of one thread.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

namespace kvpress {

// Zero-initialised, cache-line aligned memory of fixed size.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(::operator new[](size * sizeof(T) + 64, std::align_val_t(64)))) {
    std::memset(static_cast<void*>(data_), 0, size * sizeof(T) + 64);
  }
  ~Buffer() { ::operator delete[](data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data_; }

 private:
  T* data_;
};

}  // namespace kvpress
