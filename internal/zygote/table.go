package zygote

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Bounds of tables (DP_TABLE_NAME and DP_TABLES_MAX in worker/message.h).
const (
	TableName = 64 - 1 // bytes of a name
	MaxTables = 64     // of a worker
)

// Table is read-only data that a worker maps.
type Table struct {
	Name          string   // 1 to TableName bytes, without a NUL
	File          *os.File // sealed, opened for reading; the caller keeps it
	Size, Address uint64   // Address 0: the worker chooses it
	Seed          *Seed    // the worker maps the heap of this seed at its address, instead of a file; nil: none
}

// file returns the file that the worker maps. If it is a seed, all of it has arrived.
func (t *Table) file(ctx context.Context) (*os.File, error) {
	if t.Seed == nil {
		return t.File, nil
	}
	return t.Seed.File, t.Seed.Whole(ctx)
}

// tableBody returns the body of TABLE.
func (t *Table) tableBody() []byte {
	b := make([]byte, 16+TableName+1+8)
	binary.LittleEndian.PutUint64(b, t.Size)
	binary.LittleEndian.PutUint64(b[8:], t.Address)
	copy(b[16:], t.Name)
	if t.Seed != nil {
		binary.LittleEndian.PutUint32(b[16+TableName+1:], t.Seed.Units)
	}
	return b
}

// mapTable makes a worker that has just started map a table, and waits until it has.
func (w *Worker) mapTable(ctx context.Context, t *Table) error {
	f, err := t.file(ctx)
	if err == nil {
		err = wire.Control(f, func(fd int) error { return w.send(wire.Table, t.tableBody(), fd) })
	}
	if err != nil {
		return fmt.Errorf("worker %d: table %q: %w", w.id, t.Name, err)
	}
	return w.hear(ctx, func(m *wire.Message) bool { return m.Type == wire.Tabled && len(m.Body) == 0 })
}
