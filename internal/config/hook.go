package config

import (
	"encoding"
	"fmt"
	"reflect"
)

// textHook decodes scalars into types that read themselves from text (Bytes, Cores, slog.Level).
func textHook(from, to reflect.Type, data any) (any, error) {
	target := reflect.New(to)
	u, ok := target.Interface().(encoding.TextUnmarshaler)
	if !ok {
		return data, nil
	}
	switch from.Kind() {
	case reflect.String, reflect.Int, reflect.Int64, reflect.Uint64, reflect.Float64:
	default:
		return nil, fmt.Errorf("want text or a number, not a %s", from.Kind())
	}
	if err := u.UnmarshalText(fmt.Append(nil, data)); err != nil {
		return nil, err
	}
	return target.Elem().Interface(), nil
}
