// C++: containers, virtual functions, std::function, shared_ptr, exceptions, thread_local, a mutex, a thread that has ended.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {
struct Shape {
    virtual ~Shape() = default;
    virtual double area() const = 0;
};
struct Square : Shape {
    double a;
    explicit Square(double x) : a(x) {}
    double area() const override { return a * a; }
};
std::map<std::string, std::vector<int>> table;
std::shared_ptr<Shape> shape;
std::function<int(int)> add;
thread_local std::string mine = "fresh";
std::mutex mu;
int calls;
} // namespace

extern "C" uint32_t setup(void *, uint32_t, void *) {
    for (int i = 0; i < 1000; i++)
        table["key" + std::to_string(i % 100)].push_back(i);
    shape = std::make_shared<Square>(3);
    int k = 7;
    add = [k](int x) { return x + k; };
    mine = "a text that is too long for the small buffer";
    std::thread([] { mine = "of another thread"; }).join();
    return 0;
}

extern "C" uint32_t query(void *, uint32_t, void *out) {
    std::lock_guard<std::mutex> lock(mu);
    std::string caught;
    try {
        throw std::runtime_error("thrown");
    } catch (const std::exception &e) {
        caught = e.what();
    }
    std::ostringstream s;
    s << ++calls << ' ' << table.size() << ' ' << table["key5"].back() << ' ' << shape->area() << ' ' << add(1) << ' ' << mine << ' ' << caught;
    mine += "!";
    table["new" + std::to_string(calls)].push_back(1);
    return (uint32_t)snprintf(static_cast<char *>(out), 4096, "%s", s.str().c_str());
}
