package agent

import (
	"slices"
	"sync"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// tables are those of a session, in the order in which they were published. The agent has the descriptors of their memory files, which the
// client has filled. Safe for concurrent use.
type tables struct {
	mu     sync.Mutex
	list   []*grant.Table
	closed bool
}

// current returns the tables of a lease that is acquired now.
func (t *tables) current() []*grant.Table {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.list)
}

func (t *tables) add(table *grant.Table) error {
	const op = "publish a table"
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return failed(op, dataplane.StatusInvalid, "the session is closed")
	case slices.ContainsFunc(t.list, func(x *grant.Table) bool {
		return x.Name == table.Name && x.Sum == table.Sum && x.Address == table.Address
	}):
		table.Close() // the client repeats a request after it has published its tables to a new agent
		return nil
	case slices.ContainsFunc(t.list, func(x *grant.Table) bool { return x.Name == table.Name }):
		return failed(op, dataplane.StatusInvalid, "the session has a table \"%s\" already: drop it first, or choose another name", table.Name)
	case table.IsSeed() && slices.ContainsFunc(t.list, (*grant.Table).IsSeed):
		return failed(op, dataplane.StatusInvalid, "\"%s\": the session has another seed as a table, whose memory has the same address: drop it first, or open another session", table.Name)
	case len(t.list) == protocol.MaxTables:
		return failed(op, dataplane.StatusInvalid, "%q: the session has %d tables, the most", table.Name, protocol.MaxTables)
	}
	t.list = append(t.list, table)
	return nil
}

func (t *tables) drop(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.IndexFunc(t.list, func(x *grant.Table) bool { return x.Name == name })
	if i < 0 {
		return failed("drop a table", dataplane.StatusInvalid, "the session has no table \"%s\"", name)
	}
	t.list[i].Close()
	t.list = slices.Delete(t.list, i, i+1)
	return nil
}

func (t *tables) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range t.list {
		x.Close()
	}
	t.list, t.closed = nil, true
}

// publish adds a table to a session.
func (c *client) publish(r *request) error {
	m, err := protocol.DecodeTable(r.Op, r.body)
	if err != nil {
		return err
	}
	s, err := c.session("publish a table", m.Session)
	if err != nil {
		return err
	}
	if r.file == nil {
		return failed("publish a table", dataplane.StatusInvalid, "the request has no descriptor of the table \"%s\"", m.Name)
	}
	t, err := grant.NewTable(c.ctx, m.Name, r.file, m.Size, m.Address)
	if err != nil {
		return err
	}
	r.file = nil // the table's now
	if err = s.tables.add(t); err != nil {
		t.Close()
	}
	return err
}

// publishSeed adds a seed to the tables of a session.
func (c *client) publishSeed(r *request) error {
	m, err := protocol.DecodeTableSeed(r.body)
	if err != nil {
		return err
	}
	s, err := c.session("publish a seed as a table", m.Session)
	if err != nil {
		return err
	}
	t, err := s.control.SeedTable(c.ctx, m.Name, m.Seed)
	if err != nil {
		return err
	}
	return s.tables.add(t)
}

func (c *client) dropTable(r *request) error {
	m, err := protocol.DecodeTable(r.Op, r.body)
	if err != nil {
		return err
	}
	s, err := c.session("drop a table", m.Session)
	if err != nil {
		return err
	}
	return s.tables.drop(m.Name)
}
