/* rfaas_function.hpp: rfaas_function.h for C++17. Functions have typed parameters, and their exceptions become errors of the
 * caller. Header only; nothing is linked.
 *
 *     #include <rfaas_function.hpp>
 *
 *     struct option { double price, strike, years; };
 *     static double price(const option &o) {
 *         if (o.years < 0)
 *             throw std::invalid_argument("negative time " + std::to_string(o.years)); // the caller's error text
 *         ...
 *     }
 *     RFAAS_FUNCTION(price); // programs call it as "price"
 *
 *     static std::size_t prices(rfaas::span<const option> in, rfaas::span<double> out) { ... return in.size(); }
 *     RFAAS_FUNCTION(prices);
 *
 * Parameters describe the input and the room for the result, in this order:
 *   values       any number of T or const T &. They lie in the input like the members of a structure in C.
 *   input        at most one span<const T>: the rest of the input. It refers to the input and is valid until the function returns.
 *   output       at most one span<T>: the room for the result. Its size is the number of elements that fit, not the number that
 *                the caller wants. With RFAAS_LEASE_LOCAL it may be larger than the caller's buffer, so compute the number of
 *                elements to write from the input.
 * The return type describes the result:
 *   with output  an integer: how many elements of the output the result has
 *   without      void, a value, or what has data() and size(), like std::vector and std::string
 * Types must be trivially copyable, since their bytes travel to another process. Types that contain pointers compile,
 * but the pointers mean nothing there.
 *
 * If the input does not have the size that the parameters need, the call fails, and the text names both sizes. If the result is
 * larger than the caller's capacity, the caller gets RFAAS_RESULT_TOO_LARGE and the size of the result. If the result's type has a
 * fixed size, this check precedes the function. Apart from these checks, a call costs as much as in C. */
#ifndef RFAAS_FUNCTION_HPP
#define RFAAS_FUNCTION_HPP

#include <cxxabi.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <rfaas_function.h>
#include <rfaas_span.hpp>

/* Exports the C++ function, which is in scope under this name, so that programs can call it by the name. At namespace
 * scope. The function must not be overloaded or extern "C". */
#define RFAAS_FUNCTION(name) RFAAS_FUNCTION_AS(name, name)

/* The same for a function that has another name: RFAAS_FUNCTION_AS(sum_float, numbers::sum<float>). */
#define RFAAS_FUNCTION_AS(name, ...)                                                                                   \
    extern "C" __attribute__((visibility("default"), used)) std::uint32_t rfaas_exported_##name(                       \
        void *args, std::uint32_t size, void *res) __asm__(#name);                                                     \
    std::uint32_t rfaas_exported_##name(void *args, std::uint32_t size, void *res) {                                   \
        return ::rfaas::typed::function<&__VA_ARGS__>::run(args, size, res);                                           \
    }                                                                                                                  \
    static_assert(true, "so that a semicolon must follow")

namespace rfaas {

/* The table of rfaas_table as elements. Throws std::runtime_error if the program has published no such table. */
template <class T> span<const T> table(const char *name) {
    static_assert(std::is_trivially_copyable<T>::value, "elements travel as bytes: the type must be trivially copyable");
    std::size_t size = 0;
    const void *at = rfaas_table(name, &size);
    if (!at)
        throw std::runtime_error("the program has published no table \"" + std::string(name) + "\"");
    if (size % sizeof(T))
        throw std::runtime_error("table \"" + std::string(name) + "\" has " + std::to_string(size) +
                                 " bytes, want a multiple of " + std::to_string(sizeof(T)));
    return {static_cast<const T *>(at), size / sizeof(T)};
}

/* Calls rfaas_set_root with an object that lies in memory from new. All memory to which it points must also come from new, as in containers of the
 * standard library. Objects with virtual functions are not possible. */
template <class T> void set_root(const T &object) {
    static_assert(!std::is_polymorphic<T>::value, "functions that map the seed cannot call virtual functions of its objects");
    rfaas_set_root(&object, sizeof object);
}

/* Returns the root of a seed that the program has published as a table. T must have the same definition in both libraries.
 * Throws std::runtime_error if there is no such table, or if its root has another size. */
template <class T> const T &root(const char *name) {
    std::size_t size = 0;
    const void *at = rfaas_table(name, &size);
    if (!at)
        throw std::runtime_error("the program has published no table \"" + std::string(name) + "\"");
    if (size != sizeof(T))
        throw std::runtime_error("the root of table \"" + std::string(name) + "\" has " + std::to_string(size) + " bytes, want " +
                                 std::to_string(sizeof(T)));
    return *static_cast<const T *>(at);
}

/* What RFAAS_FUNCTION is made of. */
namespace typed {

enum class role { value, input, output };

template <class T> constexpr bool is_plain() {
    static_assert(std::is_trivially_copyable<T>::value, "parameters and results travel as bytes: the type must be trivially copyable");
    static_assert(!std::is_pointer<T>::value, "a pointer means nothing in another process: pass what it refers to, or an rfaas::span");
    static_assert(alignof(T) <= 64, "input and result are aligned to 64 bytes, this type needs more");
    return true;
}

/* A parameter: what it is, the element that it is made of, and the bytes that it always takes of the input. */
template <class P> struct parameter {
    static_assert(!std::is_reference<P>::value || std::is_const<std::remove_reference_t<P>>::value,
                  "take a value by const reference; results are returned, or written to an rfaas::span");
    using element = std::remove_cv_t<std::remove_reference_t<P>>;
    static constexpr role kind = role::value;
    static constexpr std::size_t bytes = is_plain<element>() ? sizeof(element) : 0;
};
template <class T> struct parameter<span<T>> {
    using element = std::remove_cv_t<T>;
    static constexpr role kind = std::is_const<T>::value ? role::input : role::output;
    static constexpr std::size_t bytes = is_plain<element>() ? 0 : 0;
};
template <class T> struct parameter<const span<T> &> : parameter<span<T>> {};

/* The offsets of the parameters in the input, which are those of a structure's members. */
template <class... P> struct layout {
    static constexpr std::size_t n = sizeof...(P);
    static constexpr role kinds[] = {parameter<P>::kind..., role::value};
    static constexpr std::size_t sizes[] = {parameter<P>::bytes..., 0};
    static constexpr std::size_t aligns[] = {(parameter<P>::kind == role::output ? 1 : alignof(typename parameter<P>::element))..., 1};

    static constexpr std::size_t up(std::size_t at, std::size_t align) { return (at + align - 1) / align * align; }
    static constexpr std::size_t at(std::size_t index) {
        std::size_t at = 0;
        for (std::size_t i = 0; i < index; i++)
            at = up(at, aligns[i]) + sizes[i];
        return up(at, aligns[index]);
    }
    static constexpr std::size_t find(role kind) {
        for (std::size_t i = 0; i < n; i++)
            if (kinds[i] == kind)
                return i;
        return n;
    }
    static constexpr bool in_order() {
        for (std::size_t i = 1; i < n; i++)
            if (kinds[i] < kinds[i - 1] || (kinds[i] == kinds[i - 1] && kinds[i] != role::value))
                return false;
        return true;
    }
    /* Bytes of the values, with the gaps that a structure of them has at its end. */
    static constexpr std::size_t padded() {
        std::size_t align = 1;
        for (std::size_t i = 0; i < n; i++)
            align = aligns[i] > align ? aligns[i] : align;
        return up(at(n), align);
    }
};

/* Fails the call, with a text about its sizes, unless the input has `size` bytes as the parameters want. */
template <class L, std::size_t Element> bool fits(std::uint32_t size) {
    constexpr std::size_t begin = L::at(L::find(role::input));
    if constexpr (L::find(role::input) == L::n) {
        if (__builtin_expect(size == begin || size == L::padded(), 1))
            return true;
        rfaas_fail("input of %u bytes: want %zu", size, begin);
    } else {
        if (__builtin_expect(size >= begin && (size - begin) % Element == 0, 1))
            return true;
        if (begin == 0)
            rfaas_fail("input of %u bytes: want a multiple of %zu", size, Element);
        else
            rfaas_fail("input of %u bytes: want %zu and a multiple of %zu", size, begin, Element);
    }
    return false;
}

template <class P> decltype(auto) argument(void *args, std::uint32_t size, void *res, std::size_t at) {
    using element = typename parameter<P>::element;
    if constexpr (parameter<P>::kind == role::value)
        return *reinterpret_cast<const element *>(static_cast<const char *>(args) + at);
    else if constexpr (parameter<P>::kind == role::input)
        return span<const element>(reinterpret_cast<const element *>(static_cast<const char *>(args) + at), (size - at) / sizeof(element));
    else
        return span<element>(static_cast<element *>(res), rfaas_result_capacity() / sizeof(element));
}

template <class T, class = void> struct is_container : std::false_type {};
template <class T>
struct is_container<T, std::void_t<decltype(*std::declval<const T &>().data()), decltype(std::declval<const T &>().size())>>
    : std::true_type {};

inline std::uint32_t result_bytes(std::size_t n, std::size_t element) {
    if (n > std::numeric_limits<std::uint32_t>::max() / element)
        return rfaas_fail("result of %zu elements of %zu bytes: a result has less than 4 GiB", n, element);
    return static_cast<std::uint32_t>(n * element);
}

/* Writes a result that is not in its place yet, and returns its bytes. */
template <class R> std::uint32_t give(const R &r, void *res) {
    if constexpr (is_container<R>::value) {
        using element = std::remove_cv_t<std::remove_reference_t<decltype(*r.data())>>;
        static_assert(is_plain<element>(), "");
        std::uint32_t bytes = result_bytes(r.size(), sizeof(element));
        if (bytes && bytes <= rfaas_result_capacity())
            std::memcpy(res, r.data(), bytes);
        return bytes;
    } else {
        static_assert(is_plain<R>(), "");
        std::memcpy(res, &r, sizeof r);
        return sizeof r;
    }
}

/* Fails the call with the exception that is being handled. */
inline std::uint32_t fail_with_exception() {
    try {
        throw;
    } catch (const std::exception &e) {
        return rfaas_fail("%s", e.what());
    } catch (...) {
        const std::type_info *type = abi::__cxa_current_exception_type();
        int status = 0;
        char *name = type ? abi::__cxa_demangle(type->name(), nullptr, nullptr, &status) : nullptr;
        rfaas_fail("exception of type %s", name ? name : "unknown");
        std::free(name);
        return 0;
    }
}

template <class R, class... P> struct signature {
    using parameters = layout<P...>;
    static_assert(parameters::in_order(), "parameters: first values, then at most one span<const T>, then at most one span<T>");
    static constexpr bool has_output = parameters::find(role::output) != parameters::n;
    static_assert(!has_output || (std::is_integral<R>::value && !std::is_same<R, bool>::value),
                  "a function with an output returns how many elements of it are the result");

    template <class T> static constexpr std::size_t element(role kind) { return parameter<T>::kind == kind ? sizeof(typename parameter<T>::element) : 0; }
    static constexpr std::size_t input_element = (element<P>(role::input) + ... + 0);
    static constexpr std::size_t output_element = (element<P>(role::output) + ... + 0);

    template <auto F, std::size_t... I>
    static std::uint32_t call(void *args, std::uint32_t size, void *res, std::index_sequence<I...>) {
        (void)args;
        if (!fits<parameters, input_element>(size))
            return 0;
        if constexpr (has_output) {
            const auto n = F(argument<P>(args, size, res, parameters::at(I))...);
            if constexpr (std::is_signed<decltype(n)>::value)
                if (n < 0)
                    return rfaas_fail("the function returned %lld elements, want 0 or more", static_cast<long long>(n));
            return result_bytes(static_cast<std::size_t>(n), output_element);
        } else if constexpr (std::is_void<R>::value) {
            F(argument<P>(args, size, res, parameters::at(I))...);
            return 0;
        } else {
            if constexpr (!is_container<R>::value)
                if (__builtin_expect(rfaas_result_capacity() < sizeof(R), 0))
                    return sizeof(R);
            return give(F(argument<P>(args, size, res, parameters::at(I))...), res);
        }
    }

    template <auto F> static std::uint32_t run(void *args, std::uint32_t size, void *res) {
        try {
            return call<F>(args, size, res, std::index_sequence_for<P...>());
        } catch (...) {
            return fail_with_exception();
        }
    }
};

template <class R, class... P> signature<R, P...> signature_of(R (*)(P...));
template <class R, class... P> signature<R, P...> signature_of(R (*)(P...) noexcept);

template <auto F> struct function {
    static std::uint32_t run(void *args, std::uint32_t size, void *res) {
        return decltype(signature_of(F))::template run<F>(args, size, res);
    }
};

} // namespace typed
} // namespace rfaas

#endif
