package etcd

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/rfaas-go/rfaas/accounting"
)

// adminTries is how often Import and Export try to hand over the ledger while etcd does not answer.
const adminTries = 5

// absent is the condition that no key begins with a prefix.
func absent(prefix string) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(prefix), "=", 0).WithPrefix()
}

// ask runs a transaction with a time limit.
func (c *Cluster) ask(ctx context.Context, conditions []clientv3.Cmp, ops ...clientv3.Op) (*clientv3.TxnResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, adminBound)
	defer cancel()
	r, err := c.client.Txn(ctx).If(conditions...).Then(ops...).Commit()
	if err != nil {
		return nil, fmt.Errorf("etcd at %v: %w", c.cfg.Endpoints, err)
	}
	return r, nil
}

// found describes what is at the prefix.
type found struct {
	id       string // empty: no ledger
	versions bool   // it has the records of a new ledger
	exported bool
}

func (c *Cluster) look(ctx context.Context) (f found, err error) {
	ops := []clientv3.Op{clientv3.OpGet(c.idKey()), clientv3.OpGet(c.key("exported"))}
	for _, r := range accounting.NewRecords() {
		ops = append(ops, clientv3.OpGet(c.recordKey(r)))
	}
	r, err := c.ask(ctx, nil, ops...)
	if err != nil {
		return f, err
	}
	f.versions = true
	for i, part := range r.Responses {
		switch kvs := part.GetResponseRange().GetKvs(); {
		case i == 0 && len(kvs) > 0:
			f.id = string(kvs[0].Value)
		case i == 1:
			f.exported = len(kvs) > 0
		case i > 1:
			f.versions = f.versions && len(kvs) > 0
		}
	}
	if f.id != "" {
		err = fmt.Errorf("there is a ledger at prefix %s already, with id %s", c.prefix(), f.id)
	}
	return f, err
}

// Init begins an empty ledger, and returns its id. Records of a ledger that has no id get one.
func (c *Cluster) Init(ctx context.Context) (id string, err error) {
	f, err := c.look(ctx)
	if err != nil {
		return "", err
	}
	id = hex.EncodeToString(newID())
	if f.versions && !f.exported {
		return id, c.finish(ctx, nil, id)
	}
	_, err = c.Import(ctx, id, func(func(accounting.Change) error) error { return nil })
	return id, err
}

// Import begins a ledger with an id and the records that load adds. Until all of them are in etcd and were read back, there is no ledger. It
// removes what an unfinished import, or an export, has left.
func (c *Cluster) Import(ctx context.Context, id string, load func(add func(accounting.Change) error) error) (accounting.Digest, error) {
	var want, got accounting.Digest
	f, err := c.look(ctx)
	if err == nil && f.versions && !f.exported {
		err = fmt.Errorf("there are records of a ledger without an id at prefix %s: \"rfaas ledger etcd init\" makes a ledger of them", c.prefix())
	}
	if err != nil {
		return got, err
	}
	token := string(newID())
	alone := []clientv3.Cmp{clientv3.Compare(clientv3.Value(c.key("importing")), "=", token)}
	put := func(conditions []clientv3.Cmp, ops ...clientv3.Op) error {
		r, err := c.ask(ctx, conditions, ops...)
		if err == nil && !r.Succeeded {
			err = errors.New("another process writes to the same prefix: try again")
		}
		return err
	}
	if err := put([]clientv3.Cmp{absent(c.idKey())}, clientv3.OpPut(c.key("importing"), token)); err != nil {
		return got, err
	}
	if err := put(alone, clientv3.OpDelete(c.key("ledger/"), clientv3.WithPrefix()), clientv3.OpDelete(c.key("exported"))); err != nil {
		return got, err
	}
	var ops []clientv3.Op
	flush := func() error {
		defer func() { ops = nil }()
		if len(ops) == 0 {
			return nil
		}
		return put(alone, ops...)
	}
	last := accounting.NewRecords() // written together with the id
	err = load(func(r accounting.Change) error {
		if slices.ContainsFunc(last, func(l accounting.Change) bool { return l.Bucket == r.Bucket && l.Key == r.Key }) ||
			r.Bucket == accounting.IDBucket && r.Key == accounting.IDKey {
			return nil
		}
		want.Add(r)
		if ops = append(ops, clientv3.OpPut(c.recordKey(r), string(r.Value))); len(ops) < mostChanges {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if err == nil {
		err = c.read(ctx, 0, func(r accounting.Change) error {
			got.Add(r)
			return nil
		})
	}
	if err == nil && got.Sum() != want.Sum() {
		err = errors.New("etcd has other records than were written")
	}
	if err != nil {
		return got, err
	}
	return got, c.finish(ctx, alone, id)
}

// finish makes a ledger of the records that are there.
func (c *Cluster) finish(ctx context.Context, conditions []clientv3.Cmp, id string) error {
	seq := string(newID())
	ops := []clientv3.Op{clientv3.OpPut(c.idKey(), id), clientv3.OpPut(c.key("seq"), seq), clientv3.OpDelete(c.key("importing"))}
	for _, r := range accounting.NewRecords() {
		ops = append(ops, clientv3.OpPut(c.recordKey(r), string(r.Value)))
	}
	ended, unknown, err := c.insist(ctx, append(conditions, absent(c.idKey())), ops, clientv3.Compare(clientv3.Value(c.key("seq")), "=", seq))
	switch {
	case unknown:
		return fmt.Errorf("the ledger %s may be in etcd now: run the command \"rfaas ledger etcd check\" before a resource manager starts: %w", id, err)
	case err == nil && !ended:
		return errors.New("another process writes to the same prefix")
	}
	return err
}

// insist repeats a transaction while etcd does not answer. An attempt whose answer was lost may have succeeded: `done` holds if one has. ok reports
// whether one has succeeded. After an error, unknown reports that one may have.
func (c *Cluster) insist(ctx context.Context, conditions []clientv3.Cmp, ops []clientv3.Op, done clientv3.Cmp) (ok, unknown bool, err error) {
	for range adminTries {
		var r *clientv3.TxnResponse
		if r, err = c.ask(ctx, conditions, ops...); err == nil && !r.Succeeded && unknown {
			r, err = c.ask(ctx, []clientv3.Cmp{done}, clientv3.OpGet(c.idKey()))
		}
		if err == nil {
			return r.Succeeded, false, nil
		}
		unknown = true
	}
	return false, unknown, err
}

// Export calls save with a function that adds all records, and with one that then ends the ledger in etcd, for CreateLedger. No resource manager may use
// it. The records stay in etcd, and resource managers refuse them. `to` is the new place, for messages.
func (c *Cluster) Export(ctx context.Context, to string, save func(load func(add func(accounting.Change) error) error, take func() (open bool, err error)) error) error {
	id, err := c.identify(ctx)
	if err != nil {
		return fmt.Errorf("etcd at %v: %w", c.cfg.Endpoints, err)
	}
	used := fmt.Errorf("resource managers use the ledger at prefix %s: stop all of them first", c.prefix())
	r, err := c.ask(ctx, []clientv3.Cmp{absent(c.key(candidates))}, clientv3.OpGet(c.key("seq")))
	if err != nil {
		return err
	}
	if !r.Succeeded {
		return used
	}
	same := []clientv3.Cmp{absent(c.key(candidates)), clientv3.Compare(clientv3.Value(c.idKey()), "=", id)}
	if kvs := r.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
		same = append(same, clientv3.Compare(clientv3.ModRevision(c.key("seq")), "=", kvs[0].ModRevision))
	}
	return save(func(add func(accounting.Change) error) error { return c.read(ctx, r.Header.Revision, add) },
		func() (open bool, err error) {
			ended, unknown, err := c.insist(ctx, same, []clientv3.Op{clientv3.OpDelete(c.idKey()), clientv3.OpPut(c.key("exported"), to)},
				clientv3.Compare(clientv3.Value(c.key("exported")), "=", to))
			switch {
			case unknown:
				return true, fmt.Errorf("the ledger may still be in etcd: run the command \"rfaas ledger etcd check\": %w", err)
			case err == nil && !ended:
				return false, used
			}
			return false, err
		})
}

// Digest reads all records, and returns the id of the ledger.
func (c *Cluster) Digest(ctx context.Context) (id string, d accounting.Digest, err error) {
	if id, err = c.identify(ctx); err != nil {
		return "", d, fmt.Errorf("etcd at %v: %w", c.cfg.Endpoints, err)
	}
	return id, d, c.read(ctx, 0, func(r accounting.Change) error {
		d.Add(r)
		return nil
	})
}
