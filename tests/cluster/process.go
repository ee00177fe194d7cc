package main

// Starting, waiting for and killing processes.
//
// Both the supervisor and the agent are parents of processes that may fork
// further ones, and nothing of all this may outlive the cluster. So each of
// them is a "child subreaper": an orphan below it becomes its own child, which
// it reaps here. os/exec must not be used in this program: its Wait would race
// with the reaper for the same exit status.

import (
	"bytes"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ownerVariable marks each pod process, and everything that it forks, with the
// folder of its container. It is how stragglers are found that left their
// process group.
const ownerVariable = "SPECDECODE_CLUSTER_CONTAINER"

// processSpec says what to start. Files become descriptors 0, 1, 2, ...
type processSpec struct {
	argv     []string
	env      []string
	dir      string
	files    []*os.File
	deathsig syscall.Signal
}

// process is a started child; status may be read once done is closed.
type process struct {
	pid    int
	done   chan struct{}
	status syscall.WaitStatus
}

var children = struct {
	sync.Mutex
	byPID map[int]*process
	start chan func()
}{byPID: map[int]*process{}, start: make(chan func())}

// becomeParent prepares this process for startProcess; call it once, first.
func becomeParent() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	exited := make(chan os.Signal, 1)
	signal.Notify(exited, syscall.SIGCHLD)
	go func() {
		for range exited {
			reap()
		}
	}()
	// PR_SET_PDEATHSIG fires when the parent *thread* ends, so all children are
	// started from one thread that lives as long as the program.
	go func() {
		runtime.LockOSThread()
		for start := range children.start {
			start()
		}
	}()
	return nil
}

// reap collects every child that has exited, adopted orphans included.
func reap() {
	children.Lock()
	defer children.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if p, ok := children.byPID[pid]; ok {
			delete(children.byPID, pid)
			p.status = status
			close(p.done)
		}
	}
}

// startProcess starts a child as leader of its own session and process group.
func startProcess(spec processSpec) (*process, error) {
	path, err := lookPath(spec.argv[0], spec.env, spec.dir)
	if err != nil {
		return nil, err
	}
	files := make([]uintptr, len(spec.files))
	for i, file := range spec.files {
		files[i] = file.Fd()
	}
	attributes := &syscall.ProcAttr{
		Dir: spec.dir, Env: spec.env, Files: files,
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: spec.deathsig},
	}
	var started *process
	finished := make(chan struct{})
	children.start <- func() {
		defer close(finished)
		// The lock keeps the reaper away until the child is registered.
		children.Lock()
		defer children.Unlock()
		var pid int
		if pid, err = syscall.ForkExec(path, spec.argv, attributes); err == nil {
			started = &process{pid: pid, done: make(chan struct{})}
			children.byPID[pid] = started
		}
	}
	<-finished
	return started, err
}

// lookPath finds a program in the PATH of the child, not in ours.
func lookPath(program string, env []string, dir string) (string, error) {
	if strings.Contains(program, "/") {
		if !filepath.IsAbs(program) {
			program = filepath.Join(dir, program)
		}
		return program, nil
	}
	for _, variable := range env {
		path, ok := strings.CutPrefix(variable, "PATH=")
		if !ok {
			continue
		}
		for _, folder := range filepath.SplitList(path) {
			candidate := filepath.Join(folder, program)
			if info, err := os.Stat(candidate); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
				return candidate, nil
			}
		}
	}
	return "", &exec.Error{Name: program, Err: exec.ErrNotFound}
}

// exitCode is the code that a shell would report: 128 + n after signal n.
func (p *process) exitCode() int32 {
	if p.status.Signaled() {
		return 128 + int32(p.status.Signal())
	}
	return int32(p.status.ExitStatus())
}

// signal reaches the leader only, as the stop signal of a container does.
func (p *process) signal(s syscall.Signal) { _ = syscall.Kill(p.pid, s) }

// killGroup ends the leader and all that stayed in its process group.
func (p *process) killGroup() { _ = syscall.Kill(-p.pid, syscall.SIGKILL) }

// exitedWithin waits at most that long for the end of the process.
func (p *process) exitedWithin(limit time.Duration) bool {
	select {
	case <-p.done:
		return true
	case <-time.After(limit):
		return false
	}
}

// killMarked kills every process of this user whose owner marker starts with
// folder, and repeats until there is none, since they may fork meanwhile.
func killMarked(folder string) {
	for range 20 {
		pids := findMarked(folder)
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func findMarked(folder string) []int {
	marker := []byte(ownerVariable + "=" + strings.TrimSuffix(folder, "/") + "/")
	entries, _ := os.ReadDir("/proc")
	var pids []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		// A zombie's environment is empty: it needs no killing.
		environ, err := os.ReadFile("/proc/" + entry.Name() + "/environ")
		if err == nil && bytes.Contains(environ, marker) {
			pids = append(pids, pid)
		}
	}
	return pids
}
