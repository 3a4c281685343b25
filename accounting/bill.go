package accounting

import (
	"cmp"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"time"
)

// Item is one item of a tariff, in the unit of its price.
type Item struct {
	Name    string  // in the tariff's settings and on the bill: "core-hour"
	Counter Counter // the counter that it charges
	Per     uint64  // counter units in one of it
}

// Items are all things that have a price, in the order of the bill.
func Items() []Item {
	return []Item{
		{"core-hour", CoreMicros, 3600 * 1e6},
		{"gib-hour", MemoryMiBMillis, 1024 * 3600 * 1e3},
		{"exec-hour", ExecMicros, 3600 * 1e6},
		{"hot-hour", HotMicros, 3600 * 1e6},
		{"million-calls", Calls, 1e6},
		{"gb-in", BytesIn, 1e9},
		{"gb-out", BytesOut, 1e9},
		{"million-failures", Failures, 1e6},
	}
}

// Tariff is the price of each item, exact. What it does not name is free. The zero value makes everything free.
type Tariff struct {
	Currency string // printed as it is
	prices   map[string]*big.Rat
}

// ParseTariff reads "core-hour=0.02,gib-hour=0.001"; the names are those of Items, the prices decimal numbers that are
// not negative. Empty: everything is free.
func ParseTariff(currency, text string) (Tariff, error) {
	t := Tariff{Currency: currency, prices: map[string]*big.Rat{}}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, value, ok := strings.Cut(part, "=")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !ok || !slices.ContainsFunc(Items(), func(i Item) bool { return i.Name == name }) {
			return t, fmt.Errorf("%q is not ITEM=PRICE with one of the items %s", part, itemNames())
		}
		if t.prices[name] != nil {
			return t, fmt.Errorf("%s has two prices", name)
		}
		price, ok := decimal(value)
		if !ok {
			return t, fmt.Errorf("%s: %q is not a price like 0.02", name, value)
		}
		t.prices[name] = price
	}
	return t, nil
}

func decimal(text string) (*big.Rat, bool) {
	if text == "" || len(text) > 40 || strings.Trim(text, "0123456789.") != "" {
		return nil, false
	}
	return new(big.Rat).SetString(text)
}

func itemNames() string {
	var names []string
	for _, i := range Items() {
		names = append(names, i.Name)
	}
	return strings.Join(names, ", ")
}

// Price returns the price of an item, 0 if it is free. The caller must not change it.
func (t *Tariff) Price(item string) *big.Rat {
	if p := t.prices[item]; p != nil {
		return p
	}
	return new(big.Rat)
}

// String is what ParseTariff reads.
func (t *Tariff) String() string {
	var parts []string
	for _, i := range Items() {
		if p := t.prices[i.Name]; p != nil {
			digits, _ := p.FloatPrec()
			parts = append(parts, i.Name+"="+p.FloatString(digits))
		}
	}
	return strings.Join(parts, ",")
}

// amountDigits is to how many digits amounts of money are rounded on a bill, each by itself.
const amountDigits = 6

// Line is one item of a tenant's bill. Numbers are decimal text, since they are exact and may exceed what a float holds.
type Line struct {
	Item     string `json:"item"`
	Units    string `json:"units"`    // the counter: core-microseconds, bytes, ...
	Quantity string `json:"quantity"` // in the item's unit, rounded to 6 digits
	Price    string `json:"price"`    // of one item
	Amount   string `json:"amount"`   // rounded to 6 digits
}

// Bill is what one tenant owes for a time.
type Bill struct {
	Tenant   string    `json:"tenant"`
	Since    time.Time `json:"since"`
	Currency string    `json:"currency"`
	Lines    []Line    `json:"lines"`
	Amount   string    `json:"amount"` // sum of the lines' rounded amounts
}

// Bills makes the bills of all tenants in totals, by name.
func Bills(tariff *Tariff, totals map[string]Total, since time.Time) []Bill {
	bills := make([]Bill, 0, len(totals))
	for _, tenant := range slices.SortedFunc(maps.Keys(totals), cmp.Compare[string]) {
		total := totals[tenant]
		b := Bill{Tenant: tenant, Since: since, Currency: tariff.Currency}
		sum := new(big.Rat)
		for _, i := range Items() {
			units := total.Of(i.Counter)
			quantity := new(big.Rat).SetFrac(units, new(big.Int).SetUint64(i.Per))
			price := tariff.Price(i.Name)
			amount, _ := new(big.Rat).SetString(new(big.Rat).Mul(quantity, price).FloatString(amountDigits))
			sum.Add(sum, amount)
			digits, _ := price.FloatPrec()
			b.Lines = append(b.Lines, Line{Item: i.Name, Units: units.String(), Quantity: quantity.FloatString(6),
				Price: price.FloatString(digits), Amount: amount.FloatString(amountDigits)})
		}
		b.Amount = sum.FloatString(amountDigits)
		bills = append(bills, b)
	}
	return bills
}
