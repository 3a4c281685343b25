package cli

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// valueType is a type of values in payloads and results.
type valueType struct {
	size   int                                      // in bytes
	append func(b []byte, s string) ([]byte, error) // appends the value that s names
	text   func(b []byte) string                    // of a value in its size
}

var valueTypes = func() map[string]valueType {
	order := binary.NativeEndian
	all := make(map[string]valueType)
	for _, bits := range []int{8, 16, 32, 64} {
		size := bits / 8
		whole := func(b []byte) uint64 {
			var full [8]byte
			copy(full[:], b) // rfaas runs on little-endian machines only
			return order.Uint64(full[:])
		}
		put := func(b []byte, v uint64) []byte { return append(b, order.AppendUint64(nil, v)[:size]...) }
		all[fmt.Sprint("u", bits)] = valueType{size, func(b []byte, s string) ([]byte, error) {
			v, err := strconv.ParseUint(s, 0, bits)
			return put(b, v), err
		}, func(b []byte) string { return strconv.FormatUint(whole(b), 10) }}
		all[fmt.Sprint("i", bits)] = valueType{size, func(b []byte, s string) ([]byte, error) {
			v, err := strconv.ParseInt(s, 0, bits)
			return put(b, uint64(v)), err
		}, func(b []byte) string { return strconv.FormatInt(int64(whole(b)<<(64-bits))>>(64-bits), 10) }}
	}
	all["f32"] = valueType{4, func(b []byte, s string) ([]byte, error) {
		v, err := strconv.ParseFloat(s, 32)
		return order.AppendUint32(b, math.Float32bits(float32(v))), err
	}, func(b []byte) string {
		return strconv.FormatFloat(float64(math.Float32frombits(order.Uint32(b))), 'g', -1, 32)
	}}
	all["f64"] = valueType{8, func(b []byte, s string) ([]byte, error) {
		v, err := strconv.ParseFloat(s, 64)
		return order.AppendUint64(b, math.Float64bits(v)), err
	}, func(b []byte) string { return strconv.FormatFloat(math.Float64frombits(order.Uint64(b)), 'g', -1, 64) }}
	return all
}()

func typeNames() string { return strings.Join(slices.Sorted(maps.Keys(valueTypes)), ", ") }

// appendValues appends to b what an argument like f64:3,4 names.
func appendValues(b []byte, arg string) ([]byte, error) {
	name, list, ok := strings.Cut(arg, ":")
	if name == "str" && ok {
		return append(b, list...), nil
	}
	t, known := valueTypes[name]
	if !ok || !known {
		return nil, fmt.Errorf("want TYPE:VALUE,... with one of the types %s, str", typeNames())
	}
	for s := range strings.SplitSeq(list, ",") {
		var err error
		if b, err = t.append(b, strings.TrimSpace(s)); err != nil {
			var n *strconv.NumError
			if errors.As(err, &n) {
				err = n.Err
			}
			return nil, fmt.Errorf("%q is not a valid %s: %w", s, name, err)
		}
	}
	return b, nil
}

// number is the text of a value. In JSON it is a number, or a string for what JSON has no number for.
type number string

func (n number) MarshalJSON() ([]byte, error) {
	if strings.ContainsAny(string(n), "NI") { // NaN and Inf
		return strconv.AppendQuote(nil, string(n)), nil
	}
	return []byte(n), nil
}

// values returns each value in b.
func (t *valueType) values(b []byte) ([]number, error) {
	if len(b)%t.size != 0 {
		return nil, fmt.Errorf("%d bytes are not a multiple of the %d bytes of one value", len(b), t.size)
	}
	var all []number
	for chunk := range slices.Chunk(b, t.size) {
		all = append(all, number(t.text(chunk)))
	}
	return all, nil
}
