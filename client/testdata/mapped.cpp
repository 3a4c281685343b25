// A setup function that prepares a map of names to numbers, and a function of another library that reads it from a seed.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rfaas_function.hpp"

namespace {

using numbers = std::map<std::string, std::vector<double>>;

#ifdef MAKES
numbers *made;

void prepare() {
    made = new numbers;
    for (int i = 0; i < 1000; i++)
        (*made)["a name that is longer than what a string has in itself " + std::to_string(i)].assign(100, i);
    (*made)["short"] = {1, 2, 3};
    rfaas::set_root(*made);
}
#else
double look_up() {
    const auto &all = rfaas::root<numbers>("numbers");
    double sum = all.at("short")[2];
    for (const auto &[name, values] : all)
        sum += values.back();
    return sum + static_cast<double>(all.size());
}

double look_elsewhere() { return rfaas::root<double>("numbers"); }
#endif

} // namespace

#ifdef MAKES
RFAAS_FUNCTION(prepare);
#else
RFAAS_FUNCTION(look_up);
RFAAS_FUNCTION(look_elsewhere);
#endif
