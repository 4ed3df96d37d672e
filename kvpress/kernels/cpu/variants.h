// SPDX-License-Identifier: Apache-2.0
// An optional kernel of one of several types.
#pragma once

#include <type_traits>
#include <variant>

namespace kvpress {

// Call step(kernel) and return true; return false without a kernel.
template <class... Kernels, class Step>
bool with(std::variant<std::monostate, Kernels...>& kernel, Step&& step) {
  return std::visit(
      [&](auto& which) {
        constexpr bool kNone = std::is_same_v<std::decay_t<decltype(which)>, std::monostate>;
        if constexpr (!kNone) step(which);
        return !kNone;
      },
      kernel);
}

}  // namespace kvpress
