// SPDX-License-Identifier: Apache-2.0
// One of several kernels, or none.
#pragma once

#include <type_traits>
#include <variant>

namespace kvpress {

// Runs step(kernel) and returns true if there is one.
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
