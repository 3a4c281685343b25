/* Functions with typed parameters (rfaas_function.hpp), for TestTypedFunctions. */
#include <rfaas_function.hpp>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace {

struct option {
    double price, strike, years;
};

double hypotenuse(double a, double b) { return std::hypot(a, b); }

double intrinsic(const option &o) {
    if (o.years < 0)
        throw std::invalid_argument("negative time " + std::to_string(o.years) + " 100%s");
    return o.price > o.strike ? o.price - o.strike : 0;
}

std::size_t doubled(rfaas::span<const double> in, rfaas::span<double> out) {
    if (in.size() <= out.size())
        for (std::size_t i = 0; i < in.size(); i++)
            out[i] = 2 * in[i];
    return in.size();
}

int shifted(std::int32_t by, const rfaas::span<const double> &in, rfaas::span<double> out) noexcept {
    if (by == 0)
        return -1;
    for (std::size_t i = 0; i < in.size() && i < out.size(); i++)
        out[i] = in[i] + by;
    return static_cast<int>(in.size());
}

std::vector<std::int64_t> iota(std::int64_t n) {
    std::vector<std::int64_t> v(static_cast<std::size_t>(n));
    std::iota(v.begin(), v.end(), 1);
    return v;
}

std::string type_of_nothing() { return "nothing"; }

void throws_int(rfaas::span<const char>) { throw 7; }

double first_of_table(rfaas::span<const char> name) { return rfaas::table<double>(std::string(name.begin(), name.end()).c_str())[0]; }

template <class T> T sum(rfaas::span<const T> in) { return std::accumulate(in.begin(), in.end(), T()); }

} // namespace

RFAAS_FUNCTION(hypotenuse);
RFAAS_FUNCTION(intrinsic);
RFAAS_FUNCTION(doubled);
RFAAS_FUNCTION(shifted);
RFAAS_FUNCTION(iota);
RFAAS_FUNCTION(type_of_nothing);
RFAAS_FUNCTION(throws_int);
RFAAS_FUNCTION(first_of_table);
RFAAS_FUNCTION_AS(sum_i64, sum<std::int64_t>);
