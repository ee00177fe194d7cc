package main

// The supervisor is the background process behind "up": the parent of the
// control plane and of the node agent. It ends everything when it is told to,
// when its owner ends, and when one of its children dies.
//
// Nothing may outlive it. If it is killed itself, the kernel kills the control
// plane and tells the agent to stop (PR_SET_PDEATHSIG); if the agent is killed,
// the kernel kills the containers' first processes and the supervisor, which
// adopts the rest, finds them by their marker.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// readyFD is the pipe on which the supervisor tells "up" how the start went.
const readyFD = 3

// ownNames is what a cluster writes into its folder, and clears when it starts.
var ownNames = []string{"etcd", "pods", "pki", "logs", "audit.log", "audit-policy.yaml", "kubeconfig", "cluster.json"}

type supervisor struct {
	options
	at     endpoints
	ports  []*reservedPort
	parts  map[string]*process
	failed chan string
}

func supervise(arguments []string) error {
	o, err := parseOptions("supervise", arguments)
	if err != nil {
		return err
	}
	report := os.NewFile(readyFD, "ready")
	syscall.CloseOnExec(readyFD)
	if err := runSupervisor(o, report); err != nil {
		fmt.Fprintf(report, "error: %v\n", err)
		return err
	}
	return nil
}

func runSupervisor(o options, report *os.File) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := becomeParent(); err != nil {
		return err
	}
	lock, err := lockFolder(o.dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	s := &supervisor{options: o, parts: map[string]*process{}, failed: make(chan string, 10)}
	defer s.stopAll()
	if err := s.start(ctx); err != nil {
		return err
	}
	fmt.Fprintln(report, "ready")
	report.Close()
	select {
	case <-ctx.Done():
		log.Print("told to stop")
		return nil
	case <-ownerGone(o.owner):
		return fmt.Errorf("owner %d has ended", o.owner)
	case name := <-s.failed:
		return fmt.Errorf("%s ended unexpectedly, see %s", name, o.dir.path("logs", name+".log"))
	}
}

// lockFolder holds DIR/lock, which contains our process id, for our life time.
func lockFolder(dir folder) (*os.File, error) {
	lock, err := os.OpenFile(dir.path("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("a cluster is running in %s; stop it with \"down\" first", dir)
	}
	if err := lock.Truncate(0); err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(lock, "%d\n", os.Getpid())
	return lock, err
}

func (s *supervisor) start(ctx context.Context) error {
	s.sweep()
	for _, name := range ownNames {
		if name == "logs" {
			continue // emptied by "up", which has opened supervisor.log in it
		}
		if err := os.RemoveAll(s.dir.path(name)); err != nil {
			return err
		}
	}
	if err := s.reservePorts(); err != nil {
		return err
	}
	if err := writeConfiguration(s.dir, s.at, s.nodeAddress); err != nil {
		return err
	}
	if err := s.startParts(ctx); err != nil {
		return err
	}
	return s.writeClusterFile()
}

func (s *supervisor) reservePorts() error {
	for _, number := range []*int{&s.at.etcd, &s.at.etcdPeer, &s.at.apiserver, &s.at.kubelet} {
		port, err := reservePort()
		if err != nil {
			return err
		}
		s.ports = append(s.ports, port)
		*number = port.number
	}
	s.kubeletPort = s.at.kubelet
	return nil
}

func (s *supervisor) startParts(ctx context.Context) error {
	if err := s.startPart(etcdArguments(s.dir, s.at), syscall.SIGKILL); err != nil {
		return err
	}
	if err := s.startPart(apiserverArguments(s.dir, s.at), syscall.SIGKILL); err != nil {
		return err
	}
	client, err := newClient(s.dir, "admin")
	if err != nil {
		return err
	}
	if err := s.waitFor(ctx, "the API server", func() error { return apiserverReady(ctx, client) }); err != nil {
		return err
	}
	if err := s.startPart(managerArguments(s.dir, s.at), syscall.SIGKILL); err != nil {
		return err
	}
	if err := s.startPart(schedulerArguments(s.dir, s.at), syscall.SIGKILL); err != nil {
		return err
	}
	if s.nodes > 0 {
		if err := s.startPart(s.options.arguments("agent"), syscall.SIGTERM); err != nil {
			return err
		}
	}
	return s.waitFor(ctx, "the nodes", func() error { return clusterReady(ctx, client, s.nodes) })
}

// startPart runs one command of this binary; its name is its first argument.
func (s *supervisor) startPart(arguments []string, deathsig syscall.Signal) error {
	name := arguments[0]
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(s.dir.path("logs", name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	part, err := startProcess(processSpec{
		argv: append([]string{self}, arguments...),
		env: []string{
			"PATH=" + os.Getenv("PATH"), "HOME=" + string(s.dir), "LANG=C.UTF-8",
			ownerVariable + "=" + s.dir.path("parts", name) + "/",
		},
		dir: string(s.dir), files: []*os.File{null, log, log}, deathsig: deathsig,
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	s.parts[name] = part
	go func() {
		<-part.done
		s.failed <- name
	}()
	return nil
}

// waitFor polls a condition for at most two minutes, on a busy machine too.
func (s *supervisor) waitFor(ctx context.Context, what string, ready func() error) error {
	started, limit := time.Now(), time.After(2*time.Minute)
	for {
		err := ready()
		if err == nil {
			log.Printf("%s: ready after %s", what, time.Since(started).Round(time.Millisecond))
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case name := <-s.failed:
			return fmt.Errorf("%s ended while starting, see %s", name, s.dir.path("logs", name+".log"))
		case <-ctx.Done():
			return errors.New("stopped while starting")
		case <-limit:
			return fmt.Errorf("waited 2 minutes for %s: %w", what, err)
		}
	}
}

func (s *supervisor) writeClusterFile() error {
	pids := map[string]int{"supervisor": os.Getpid()}
	for name, part := range s.parts {
		pids[name] = part.pid
	}
	content, err := json.MarshalIndent(map[string]any{
		"pids":       pids,
		"server":     s.at.server(),
		"kubelet":    fmt.Sprintf("https://127.0.0.1:%d", s.at.kubelet),
		"kubeconfig": kubeconfigPath(s.dir, "admin"),
		"images":     s.images,
		"nodes":      nodeNames(s.nodes),
		"auditLog":   s.dir.path("audit.log"),
	}, "", "  ")
	if err != nil {
		return err
	}
	return writeFileAtomically(s.dir.path("cluster.json"), append(content, '\n'))
}

func writeFileAtomically(path string, content []byte) error {
	temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	if err := os.WriteFile(temporary, content, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// stopAll gives the agent time to end the pods; the control plane has nothing
// to lose, for its data goes with it.
func (s *supervisor) stopAll() {
	if agent, ok := s.parts["agent"]; ok {
		agent.signal(syscall.SIGTERM)
		agent.exitedWithin(10 * time.Second)
	}
	for _, part := range s.parts {
		part.killGroup()
		part.exitedWithin(5 * time.Second)
	}
	s.sweep()
	_ = os.Remove(s.dir.path("cluster.json"))
}

func (s *supervisor) sweep() { sweepFolder(s.dir) }

// sweepFolder kills whatever still carries the marker of this cluster.
func sweepFolder(dir folder) {
	killMarked(dir.path("parts"))
	killMarked(dir.path("pods"))
}

// ownerGone is closed when the process ends; with no owner it never is.
func ownerGone(pid int) <-chan struct{} {
	gone := make(chan struct{})
	if pid <= 0 {
		return gone
	}
	go func() {
		defer close(gone)
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			pollUntilGone(pid)
			return
		}
		defer unix.Close(fd)
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if err != unix.EINTR {
				return
			}
		}
	}()
	return gone
}

// pollUntilGone serves kernels without pidfd.
func pollUntilGone(pid int) {
	for syscall.Kill(pid, 0) != syscall.ESRCH {
		time.Sleep(time.Second)
	}
}
