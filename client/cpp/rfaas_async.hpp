/* rfaas_async.hpp: futures, and coroutines for C++20. Include rfaas.hpp, which includes this file. Futures and
 * coroutines use no threads of their own: the functions below start calls and take results on the caller's thread.
 *
 *     rfaas::future<double> a = lease.async<double>(price, first), b = lease.async<double>(price, second);
 *     std::vector<double> x = a.get(), y = b.get();
 *
 *     rfaas::task<double> total(rfaas::lease &lease, rfaas::function price, std::vector<double> in) {
 *         std::vector<double> out = co_await lease.async<double>(price, in);
 *         co_return std::accumulate(out.begin(), out.end(), 0.0);
 *     }
 *     double x = rfaas::run(total(lease, price, in));      // or, for many: run(when_all(std::move(tasks)))
 */
#ifndef RFAAS_ASYNC_HPP
#define RFAAS_ASYNC_HPP

#include <rfaas.hpp>

#if defined(__cpp_impl_coroutine)
#include <coroutine>
#include <optional>
#endif

namespace rfaas {

/* A call that lease::async has begun. If no worker had a free slot, it keeps a copy of the payload, and the call starts when a later operation
 * finds one. Only one thread may use it. */
class pending {
  public:
    pending(pending &&) noexcept = default;
    /* Cancels the call that this object had, at once. */
    pending &operator=(pending &&other) noexcept {
        request_ = request(); /* before its memory goes */
        lease_ = other.lease_;
        function_ = other.function_;
        options_ = other.options_;
        in_ = std::move(other.in_);
        out_ = std::move(other.out_);
        request_ = std::move(other.request_);
        size_ = other.size_;
        failed_ = std::move(other.failed_);
        ended_ = other.ended_;
        return *this;
    }

    /* Returns true if the call has ended. Does not block. */
    bool ready() {
        if (ended_ || !start())
            return ended_;
        int done = 0;
        std::size_t bytes = 0;
        int status = rfaas_test(&request_.get(), &done, &bytes);
        if (status || done)
            end(status, bytes);
        return ended_;
    }
    /* Waits until the call has ended. Throws busy_error if other requests of the program occupy all slots. */
    void wait() {
        if (ended_)
            return;
        if (!start())
            check(RFAAS_BUSY);
        std::size_t bytes = 0;
        int status = rfaas_wait(&request_.get(), &bytes);
        end(status, bytes);
    }

  protected:
    pending(rfaas_lease *lease, rfaas::function f, span<const std::byte> in, std::size_t room, const call_options &options)
        : lease_(lease), function_(f), options_(options), out_(room) {
        if (!try_start(in))
            in_.assign(in.begin(), in.end());
    }
    ~pending() = default;
    /* The result. Throws the call's error. */
    span<const std::byte> result() {
        wait();
        if (failed_)
            std::rethrow_exception(failed_);
        return span<const std::byte>(out_.data(), size_);
    }

  private:
    friend class loop;

    bool try_start(span<const std::byte> in) {
        rfaas_request r = RFAAS_REQUEST_NULL;
        int status = rfaas_iinvoke(lease_, function_, in.data(), in.size(), out_.data(), out_.size(), &options_, &r);
        if (RFAAS_CLASS(status) == RFAAS_CLASS_BUSY)
            return false;
        check(status);
        request_ = request(r);
        return true;
    }
    /* Returns true if the call has been started. A call that cannot be started has ended. */
    bool start() {
        if (request_ || ended_)
            return true;
        try {
            return try_start(in_);
        } catch (...) {
            failed_ = std::current_exception();
            ended_ = true;
            return true;
        }
    }
    void end(int status, std::size_t bytes) {
        ended_ = true;
        size_ = bytes;
        request_.detach();
        try {
            check(status);
        } catch (...) {
            failed_ = std::current_exception();
        }
    }

    rfaas_lease *lease_;
    rfaas::function function_;
    call_options options_;
    std::vector<std::byte> in_, out_;
    request request_; /* after out_, so that it ends first */
    std::size_t size_ = 0;
    std::exception_ptr failed_;
    bool ended_ = false;
};

/* A future for the elements of a result. Unlike with std::future, get may be called more than once, and the destructor cancels the call
 * instead of waiting for it. */
template <class T> class future : public pending {
    static_assert(std::is_trivially_copyable<T>::value, "elements travel as bytes");

  public:
    std::vector<T> get() {
        auto bytes = result();
        std::vector<T> elements(bytes.size() / sizeof(T));
        if (!elements.empty())
            std::memcpy(elements.data(), bytes.data(), elements.size() * sizeof(T));
        return elements;
    }

  private:
    friend class lease;
    future(rfaas_lease *lease, rfaas::function f, span<const std::byte> in, std::size_t room, const call_options &options)
        : pending(lease, f, in, room, options) {}
};

template <class Out, class In>
future<Out> lease::async(rfaas::function f, const In &in, std::size_t most, const call_options &options) {
    auto from = payload(in);
    return future<Out>(handle_, f, span<const std::byte>(reinterpret_cast<const std::byte *>(from.data()), from.bytes()), most * sizeof(Out), options);
}

#if defined(__cpp_impl_coroutine)

/* ---- coroutines ---- */

/* The coroutines of one rfaas::run that wait for calls. */
class loop {
  public:
    void wait_for(pending &call, std::coroutine_handle<> coroutine) { waiting_.push_back({&call, coroutine}); }

    /* Waits until a call has ended, and resumes its coroutine. */
    void step() {
        std::vector<rfaas_request> requests(waiting_.size(), RFAAS_REQUEST_NULL);
        std::size_t started = 0;
        rfaas_lease *full = nullptr;
        for (std::size_t i = 0; i < waiting_.size(); i++) {
            pending &call = *waiting_[i].call;
            if (call.lease_ == full && !call.request_)
                continue;
            if (!call.start()) {
                full = call.lease_;
                continue;
            }
            if (call.ended_)
                return resume(i);
            requests[i] = call.request_.get();
            started++;
        }
        std::size_t at = started ? undefined : 0, bytes = 0; /* none started: other requests of the program occupy all slots */
        int status = started ? rfaas_waitany(requests.size(), requests.data(), &at, &bytes) : RFAAS_BUSY;
        if (at == undefined)
            check(status);
        waiting_[at].call->end(status, bytes);
        resume(at);
    }

  private:
    struct waiter {
        pending *call;
        std::coroutine_handle<> coroutine;
    };
    void resume(std::size_t i) {
        auto coroutine = waiting_[i].coroutine;
        waiting_.erase(waiting_.begin() + std::ptrdiff_t(i));
        coroutine.resume();
    }
    std::vector<waiter> waiting_; /* oldest first */
};

template <class T> class task;

/* Base of the promises of all tasks. */
class task_promise {
  public:
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept { return end_awaiter{}; }
    void unhandled_exception() { failed_ = std::current_exception(); }

    template <class T> auto await_transform(future<T> &f) { return call_awaiter<T>{f, loop_}; }
    template <class T> auto await_transform(future<T> &&f) { return call_awaiter<T>{f, loop_}; }
    template <class T> auto await_transform(task<T> &&t) { return task_awaiter<T>{std::move(t), loop_}; }
    template <class T> auto await_transform(const std::vector<task<T>> &tasks) { return tasks_awaiter<T>{tasks, loop_, tasks.size() + 1}; }

  private:
    template <class T> friend class task;

    struct end_awaiter {
        bool await_ready() noexcept { return false; }
        template <class Promise> std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> h) noexcept {
            task_promise &p = h.promise();
            bool last = !p.left_ || --*p.left_ == 0;
            return last && p.next_ ? p.next_ : std::noop_coroutine();
        }
        void await_resume() noexcept {}
    };
    template <class T> struct call_awaiter {
        future<T> &call;
        loop *in;
        bool await_ready() { return call.ready(); }
        void await_suspend(std::coroutine_handle<> h) { in->wait_for(call, h); }
        std::vector<T> await_resume() { return call.get(); }
    };
    template <class T> struct task_awaiter {
        task<T> child;
        loop *in;
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(std::coroutine_handle<> h) { return child.begin(in, h, nullptr); }
        T await_resume() { return child.take(); }
    };
    template <class T> struct tasks_awaiter {
        const std::vector<task<T>> &children;
        loop *in;
        std::size_t left; /* children that have not ended, and 1 until all have begun */
        bool await_ready() noexcept { return false; }
        bool await_suspend(std::coroutine_handle<> h) {
            for (const task<T> &child : children)
                child.begin(in, h, &left).resume();
            return --left != 0;
        }
        void await_resume() noexcept {}
    };

    loop *loop_ = nullptr;
    std::coroutine_handle<> next_; /* resumed at the end, if left_ is NULL or reaches 0 */
    std::size_t *left_ = nullptr;  /* tasks that have not ended, shared by the tasks of when_all; NULL: a single task */
    std::exception_ptr failed_;
};

template <class T> class result_promise : public task_promise {
  public:
    template <class U> void return_value(U &&value) { value_.emplace(std::forward<U>(value)); }
    T take() { return std::move(*value_); }

  private:
    std::optional<T> value_;
};
template <> class result_promise<void> : public task_promise {
  public:
    void return_void() noexcept {}
    void take() noexcept {}
};

/* A coroutine that may co_await futures and other tasks. It begins when it is awaited or run, and its result can be taken once. */
template <class T = void> class task {
  public:
    struct promise_type : result_promise<T> {
        task get_return_object() { return task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    };
    task(task &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    task &operator=(task &&other) noexcept {
        task old(std::move(*this));
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~task() {
        if (handle_)
            handle_.destroy();
    }

    /* For run, when_all and co_await. begin returns the coroutine for the caller to resume. `next` is resumed when the task ends or, with
     * `left`, when the last task that shares `left` ends. take returns the result of an ended task, or rethrows its exception. */
    std::coroutine_handle<> begin(loop *in, std::coroutine_handle<> next, std::size_t *left) const {
        task_promise &p = handle_.promise();
        p.loop_ = in;
        p.next_ = next;
        p.left_ = left;
        return handle_;
    }
    bool done() const noexcept { return handle_.done(); }
    T take() {
        if (static_cast<task_promise &>(handle_.promise()).failed_)
            std::rethrow_exception(static_cast<task_promise &>(handle_.promise()).failed_);
        return handle_.promise().take();
    }

  private:
    explicit task(std::coroutine_handle<promise_type> handle) noexcept : handle_(handle) {}
    std::coroutine_handle<promise_type> handle_;
};

/* Runs all tasks until they have ended, then returns their results in this order, or throws the first error. While one
 * task waits for a call, others continue. */
template <class T> task<std::vector<T>> when_all(std::vector<task<T>> tasks) {
    co_await tasks;
    std::vector<T> results;
    results.reserve(tasks.size());
    for (task<T> &t : tasks)
        results.push_back(t.take());
    co_return results;
}
inline task<void> when_all(std::vector<task<void>> tasks) {
    co_await tasks;
    for (task<void> &t : tasks)
        t.take();
}

/* Runs a task and all that it awaits on this thread, and returns its result. */
template <class T> T run(task<T> t) {
    loop calls;
    t.begin(&calls, nullptr, nullptr).resume();
    while (!t.done())
        calls.step();
    return t.take();
}

#endif

} // namespace rfaas

#endif
