// SPDX-License-Identifier: Apache-2.0
// Calls one entry point of the kernels on tensors stored in a file, and writes the tensors back. It runs kernels compiled for
// another processor under emulation.
//
// Usage: runner ENTRY FILE
//
// The file has: int64 counts of fields and of bytes; the fields, eight bytes each, where a pointer is an offset into the bytes;
// one int64 per field, nonzero for a pointer; the bytes. The result replaces the first count.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define ENTRIES(entry)                                                                              \
  entry(kvpress_dense) entry(kvpress_packed) entry(kvpress_parts) entry(kvpress_coded)              \
      entry(kvpress_mass) entry(kvpress_quantise) entry(kvpress_bounds) entry(kvpress_labels)       \
      entry(kvpress_label_rows) entry(kvpress_page_rows) entry(kvpress_select) entry(kvpress_split_rows)              \
      entry(kvpress_prefill) entry(kvpress_tile_mass)
#define DECLARE(name) extern "C" int name(const void*);
ENTRIES(DECLARE)

int main(int, char** argv) {
  std::FILE* file = std::fopen(argv[2], "r+b");
  int64_t counts[2];
  if (!file || std::fread(counts, 8, 2, file) != 2) return 2;
  std::vector<int64_t> fields(counts[0]), pointers(counts[0]);
  char* bytes = static_cast<char*>(std::aligned_alloc(64, counts[1] / 64 * 64 + 64));
  if (std::fread(fields.data(), 8, counts[0], file) != size_t(counts[0])) return 2;
  if (std::fread(pointers.data(), 8, counts[0], file) != size_t(counts[0])) return 2;
  if (std::fread(bytes, 1, counts[1], file) != size_t(counts[1])) return 2;
  for (int64_t i = 0; i < counts[0]; ++i)
    if (pointers[i]) fields[i] += reinterpret_cast<int64_t>(bytes);
  int64_t result = -2;
#define CALL(name) \
  if (!std::strcmp(argv[1], #name)) result = name(fields.data());
  ENTRIES(CALL)
  std::rewind(file);
  std::fwrite(&result, 8, 1, file);
  std::fseek(file, 16 + 16 * counts[0], SEEK_SET);
  std::fwrite(bytes, 1, counts[1], file);
  return std::fclose(file);
}
