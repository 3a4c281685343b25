#include "resume.h"

#include <stdbool.h>

#include "heap.h"

static bool hold;
static uint32_t number;

int dp_resume_add(void (*f)(void *), void *arg) {
    if (!hold || !dp_heap_inside()) {
        f(arg);
        return 0;
    }
    dp_heap_kept *k = dp_heap_kept_at();
    if (k->resumes == DP_HEAP_RESUMES)
        return -1;
    k->resume[k->resumes++] = (dp_heap_resume){f, arg};
    return 0;
}

uint32_t dp_resume_child(void) { return number; }

void dp_resume_hold(void) { hold = true; }

/* The number is read again in each round: a function may change the list, which lies in memory of user code. */
void dp_resume_run(uint32_t child) {
    const dp_heap_kept *k = dp_heap_kept_at();
    hold = false;
    number = child;
    for (uint32_t i = 0; i < k->resumes && i < DP_HEAP_RESUMES; i++)
        k->resume[i].call(k->resume[i].arg);
}
