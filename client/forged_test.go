package client_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// forgesSource has functions that run for ever and write to the page that the worker shares with its executor.
const forgesSource = `
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static volatile uint64_t *find_page(void) {
	static char line[512];
	unsigned long from = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		if (strstr(line, "rfaas-page") && sscanf(line, "%lx-", &from) == 1)
			break;
	return (volatile uint64_t *)from;
}

// The page shows that calls begin and end all the time.
uint32_t counts(void *args, uint32_t size, void *res) {
	volatile uint64_t *page = find_page();
	if (!page)
		return 0;
	for (uint64_t n = 1000;; n++) {
		page[0] = n << 16;
		page[1] = n - 1;
	}
}

// The page shows that nothing runs, and counts calls.
uint32_t idles(void *args, uint32_t size, void *res) {
	volatile uint64_t *page = find_page();
	if (!page)
		return 0;
	for (uint64_t n = 1000;; n++)
		page[1] = n + 1;
}
`

// The call limit also ends a function that runs for ever and forges its worker's page, because its client reports that
// it has no answer.
func TestForgedPage(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Library: compile(t, "forges.so", forgesSource, "-std=gnu11", "-O1"), CallLimit: 500 * time.Millisecond, Workers: 2})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	var calls sync.WaitGroup
	for i, name := range []string{"counts", "idles"} { // concurrently, because each takes seconds
		f := function(t, l, name)
		calls.Go(func() {
			_, err := l.Worker(i).Invoke(ctx, f, nil, make([]byte, 8))
			var e *client.Error
			if !errors.As(err, &e) || e.Status != client.StatusTimeLimit {
				t.Errorf("%s: %v, want status %d", name, err, client.StatusTimeLimit)
			}
		})
	}
	calls.Wait()
}
