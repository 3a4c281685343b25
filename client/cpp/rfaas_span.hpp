/* rfaas::span, for programs (rfaas.hpp) and functions (rfaas_function.hpp). C++17 has no std::span. */
#ifndef RFAAS_SPAN_HPP
#define RFAAS_SPAN_HPP

#include <cstddef>
#include <type_traits>
#include <utility>

namespace rfaas {

/* Consecutive elements that the span does not own: of a vector, of an array, or a pointer and a number. */
template <class T> class span {
  public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t N> constexpr span(T (&array)[N]) noexcept : data_(array), size_(N) {}
    /* Anything with data() and size() of such elements. */
    template <class C, class = std::enable_if_t<std::is_convertible<
                           std::remove_pointer_t<decltype(std::declval<C &>().data())> (*)[], T (*)[]>::value>>
    constexpr span(C &container) noexcept : data_(container.data()), size_(container.size()) {}
    template <class C, class = std::enable_if_t<std::is_const<T>::value && std::is_convertible<
                           std::remove_pointer_t<decltype(std::declval<const C &>().data())> (*)[], T (*)[]>::value>>
    constexpr span(const C &container) noexcept : data_(container.data()), size_(container.size()) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr std::size_t bytes() const noexcept { return size_ * sizeof(T); }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t i) const noexcept { return data_[i]; }

  private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

} // namespace rfaas

#endif
