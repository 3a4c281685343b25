package executor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// While a seed arrives (copy.go), its source can be lost. Workers have started from the seed by then, so they would end. First the executor asks the caller for another executor
// that has the seed. The caller has that one lend the seed, and names it by a further request.

// seedSource is a source of a seed, and what it has.
type seedSource struct {
	*fetchSource
	*seedOffer
	closed chan struct{} // closed when nothing reads from the source any more
}

func newSeedSource(s *fetchSource, o *seedOffer) *seedSource {
	return &seedSource{s, o, make(chan struct{})}
}

// close closes the connection. Nil: there is none.
func (s *seedSource) close() {
	if s != nil {
		s.fetchSource.close()
		close(s.closed)
	}
}

// filling is a seed that is being copied while workers use it. Only the goroutine that reads the seed at the moment uses source, which is nil after the last one is lost.
type filling struct {
	seed    *zygote.Seed
	ctx     context.Context // of the first request; it also ends when the node drains
	send    func(*control.FetchReply) error
	sending chan struct{} // capacity 1: full while a reply is sent
	source  *seedSource
	copies  *sameFillings
	rest    chan struct{} // closed by begin: from then on, everything is read
	begin   func()
}

func newFilling(ctx context.Context, send func(*control.FetchReply) error) *filling {
	f := &filling{ctx: ctx, send: send, sending: make(chan struct{}, 1), rest: make(chan struct{})}
	f.begin = sync.OnceFunc(func() { close(f.rest) })
	return f
}

// fillings are the seeds that arrive, by their copyKey. The zero value has none.
type fillings struct {
	mu   sync.Mutex
	list map[sum]*sameFillings
}

// sameFillings are copies of one seed that arrive at the same time. A second copy begins when the first one is no longer in the store, because a lease has taken it out or it was evicted.
// Each copy can use a source of the others, because all have the same bytes and the same owner.
type sameFillings struct {
	next chan *seedSource // another source, for one that has lost its own
	over chan struct{}    // closed when no copy is left
	all  []*filling       // guarded by the lock of the fillings
}

func (l *fillings) add(key sum, f *filling) (remove func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.list == nil {
		l.list = map[sum]*sameFillings{}
	}
	same := l.list[key]
	if same == nil {
		same = &sameFillings{next: make(chan *seedSource), over: make(chan struct{})}
		l.list[key] = same
	}
	f.copies, same.all = same, append(same.all, f)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if same.all = slices.DeleteFunc(same.all, func(x *filling) bool { return x == f }); len(same.all) == 0 {
			close(same.over)
			delete(l.list, key)
		}
	}
}

// get returns the copies of a seed that are arriving, or nil.
func (l *fillings) get(key sum) *sameFillings {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.list[key]
}

// hurry makes all copies of a seed arrive as fast as they can.
func (l *fillings) hurry(key sum) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if same := l.list[key]; same != nil {
		for _, f := range same.all {
			f.seed.Hurry()
		}
	}
}

// read reads parts of the seed.
func (f *filling) read(parts []zygote.SeedPart, b []byte) error {
	s := f.source
	if s == nil {
		return errors.New("the seed has no source any more")
	}
	list := make([]dataplane.Part, 0, len(parts))
	for _, x := range parts {
		from := dataplane.Part{Addr: s.proofs.GetAddr() + x.Offset, Size: x.Size, Key: s.proofs.GetKey()}
		if x.Segment >= 0 {
			from.Addr, from.Key = s.at[x.Segment]+x.Offset, s.key
		}
		list = append(list, from)
	}
	return s.readParts(b, list)
}

// sendPatience is how long the caller of a stream may delay a message by not reading the ones before it.
const sendPatience = 500 * time.Millisecond

var errNotRead = fmt.Errorf("the caller has not read its stream for %v", sendPatience)

// sendWithin sends a message. If the caller of the stream does not read it, or ctx ends, sendWithin returns an error. Then the sending ends with the stream's handler.
func sendWithin(ctx context.Context, send func() error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, sendPatience, errNotRead)
	defer cancel()
	sent := make(chan error, 1)
	go func() { sent <- send() }()
	select {
	case err := <-sent:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// tell sends the caller a reply. Workers wait for pages meanwhile, and a drain for the end, so a caller that does not read can delay them only once.
func (f *filling) tell(r *control.FetchReply) error {
	select {
	case f.sending <- struct{}{}:
	default:
		return errNotRead
	}
	return sendWithin(f.ctx, func() error {
		defer func() { <-f.sending }()
		return f.send(r)
	})
}

// lost asks the caller for another source, and waits for it.
func (f *filling) lost(why error) error {
	f.source.close()
	f.source = nil
	if f.ctx.Err() != nil { // the caller has left, or this node drains
		return why
	}
	if err := f.tell(&control.FetchReply{Lost: why.Error()}); err != nil {
		return why
	}
	patience := time.NewTimer(fetchConnect)
	defer patience.Stop()
	select {
	case f.source = <-f.copies.next:
		return nil
	case <-f.ctx.Done():
		return fmt.Errorf("%w; no other executor has lent it", why)
	case <-patience.C:
		return fmt.Errorf("%w; no other executor has lent it within %v", why, fetchConnect)
	}
}

// touched sends the caller the list of what workers have touched. The source adds it to the seed's description, so that other executors read these parts early.
func (f *filling) touched(list []zygote.SeedRun) {
	_ = f.tell(&control.FetchReply{Touched: numbersOf(list)}) // if the caller has left, the reading ends; a later list has all of this one
}

// replaceSource gives a seed that is being read a new source, in place of one that is lost.
func (e *Executor) replaceSource(ctx context.Context, key sum, offer *seedOffer, req *control.FetchRequest, stream grpc.ServerStreamingServer[control.FetchReply]) error {
	copies := e.fillings.get(key)
	if copies == nil || offer.proofs.GetSize() == 0 {
		return control.Errorf(control.ClassLease, "the executor is not copying this seed")
	}
	connect, end := context.WithCancelCause(context.WithoutCancel(stream.Context())) // after connecting, the end of the stream does not end the source
	defer end(nil)
	stop := context.AfterFunc(ctx, func() { end(context.Cause(ctx)) })
	source, err := e.connectSource(connect, req, nil, stream.Send)
	if stop(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, fetchConnect, errors.New("the seed still has a source"))
	defer cancel()
	given := newSeedSource(source, offer)
	select {
	case copies.next <- given:
	case <-copies.over:
		given.close()
		return control.Errorf(control.ClassLease, "the executor is not copying this seed any more")
	case <-ctx.Done():
		given.close()
		return fetchError(context.Cause(ctx))
	}
	_ = stream.Send(&control.FetchReply{Done: true, Filling: true}) // if the caller has left, the reading goes on without it
	defer context.AfterFunc(stream.Context(), func() { e.fillings.hurry(key) })()
	<-given.closed
	return nil
}

// runsOf and numbersOf convert between the list in messages and that of package zygote.
func runsOf(numbers []uint32) (list []zygote.SeedRun) {
	for ; len(numbers) >= 2; numbers = numbers[2:] {
		list = append(list, zygote.SeedRun{First: numbers[0], Count: numbers[1]})
	}
	return list
}

func numbersOf(list []zygote.SeedRun) (numbers []uint32) {
	for _, r := range list {
		numbers = append(numbers, r.First, r.Count)
	}
	return numbers
}
