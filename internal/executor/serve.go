package executor

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// Serve runs an executor on this node until ctx ends, then drains it. nil: it ended as it should.
func Serve(ctx context.Context, s config.Executor, log *slog.Logger) error {
	path, err := workerPath(&s)
	if err != nil {
		return err
	}
	s.Worker = path
	z, err := zygote.Start(ctx, zygote.Config{Path: path, Log: log})
	if err != nil {
		return fmt.Errorf("start %s: %w", path, err)
	}
	defer z.Close()
	return serveWith(ctx, s, zygoteSpawner{z}, log)
}

// serveWith is Serve with workers from anywhere.
func serveWith(ctx context.Context, s config.Executor, spawner Spawner, log *slog.Logger) error {
	cfg, err := nodeConfig(s, spawner, log)
	if err != nil {
		return err
	}
	e, err := New(cfg)
	if err != nil {
		return err
	}
	port, err := control.OpenPort(control.PortConfig{Listen: s.Listen, AllowPlaintext: s.AllowPlaintext,
		SecretFile: s.SecretFile, AddressFile: s.AddressFile})
	if err != nil {
		return err
	}
	e.Register(port.Server)

	background, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	defer e.shutdown(port)
	var reg *registrar
	if s.Manager != "" {
		conn, err := control.Dial(s.Manager, control.DialConfig{SecretFile: s.SecretFile, AllowPlaintext: s.AllowPlaintext})
		if err != nil {
			return err
		}
		defer conn.Close()
		reg = newRegistrar(conn, s.Manager, config.AdvertisedAddress(s.Advertise, port.Address), e.info, log)
	}
	wg.Go(func() { e.Run(background) })
	if err := port.Serve(); err != nil {
		return err
	}
	log.Info("ready", "address", port.Address, "cores", config.Cores{List: cfg.CPUs}.String(),
		"memory", config.Bytes(cfg.Memory).String(), "providers", cfg.Providers)
	if reg != nil {
		// Before the port closes, so that nobody is sent here any more; the last one registered is the first to go.
		regCtx, stop := context.WithCancel(background)
		var gone sync.WaitGroup
		gone.Go(func() { reg.run(regCtx) })
		defer gone.Wait()
		defer stop()
	}
	select {
	case <-ctx.Done():
	case err = <-port.Failed():
		err = fmt.Errorf("control port: %w", err)
	}
	log.Info("draining", "grace", s.Grace)
	drainCtx, stop := context.WithTimeout(context.Background(), s.Grace)
	defer stop()
	e.BeginDrain()
	if reg != nil {
		reg.report()
	}
	e.Drain(drainCtx)
	return err
}

// shutdown ends what is left: nothing after a drain, everything after a failed start.
func (e *Executor) shutdown(port *control.Port) {
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	port.Close(ctx)
	if n := port.Gate.Refused(); n > 0 {
		e.log.Warn("calls without the right secret were refused", "calls", n)
	}
	e.codes.close()
}

// nodeConfig finds out what this node has.
func nodeConfig(s config.Executor, spawner Spawner, log *slog.Logger) (Config, error) {
	cfg := Config{Settings: s, Spawner: spawner, Log: log, Memory: uint64(s.Memory)}
	allowed, err := AllowedCPUs()
	if err != nil {
		return cfg, err
	}
	if cfg.CPUs, err = s.Cores.Pick(allowed); err != nil {
		return cfg, err
	}
	if cfg.Memory == 0 {
		if cfg.Memory, err = availableMemory("/"); err != nil {
			return cfg, err
		}
	}
	if cfg.Providers, err = chooseProviders(s.ProviderList(), spawner.VerbsDevices()); err != nil {
		return cfg, err
	}
	if cfg.NodeID, err = control.NodeID(); err != nil {
		return cfg, err
	}
	if cfg.Node, err = os.Hostname(); err != nil {
		return cfg, err
	}
	return cfg, nil
}
