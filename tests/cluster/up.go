package main

// The commands that a person types: "up" starts a supervisor in the background
// and waits for its word, "down" stops it.

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func up(arguments []string) error {
	o, err := parseOptions("up", arguments)
	if err != nil {
		return err
	}
	if err := prepareFolder(o); err != nil {
		return err
	}
	answer, pid, err := startSupervisor(o)
	if err != nil {
		return err
	}
	defer answer.Close()
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-interrupted
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}()
	line, _ := bufio.NewReader(answer).ReadString('\n')
	switch line = strings.TrimSpace(line); {
	case line == "ready":
		fmt.Printf("cluster is ready\nexport KUBECONFIG=%s\n", kubeconfigPath(o.dir, "admin"))
		return nil
	case line == "":
		return fmt.Errorf("the supervisor ended, see %s", o.dir.path("logs", "supervisor.log"))
	default:
		return errors.New(strings.TrimPrefix(line, "error: "))
	}
}

// prepareFolder makes DIR and refuses one that holds somebody else's files
// under the names that a start would clear.
func prepareFolder(o options) error {
	if err := os.MkdirAll(string(o.dir), 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(o.dir.path("lock")); errors.Is(err, os.ErrNotExist) {
		for _, name := range ownNames {
			if _, err := os.Lstat(o.dir.path(name)); err == nil {
				return fmt.Errorf("%s is not empty and was not made by this command: choose another --dir", o.dir)
			}
		}
	}
	if isRunning(o.dir) {
		return fmt.Errorf("a cluster is running in %s; stop it with \"down\" first", o.dir)
	}
	if err := os.RemoveAll(o.dir.path("logs")); err != nil {
		return err
	}
	if err := os.MkdirAll(o.dir.path("logs"), 0o700); err != nil {
		return err
	}
	if _, err := os.Stat(o.images); errors.Is(err, os.ErrNotExist) {
		return os.WriteFile(o.images, []byte("{}\n"), 0o600)
	}
	return nil
}

// startSupervisor returns the pipe on which the supervisor will report.
func startSupervisor(o options) (*os.File, int, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, 0, err
	}
	answer, report, err := os.Pipe()
	if err != nil {
		return nil, 0, err
	}
	defer report.Close()
	log, err := os.Create(o.dir.path("logs", "supervisor.log"))
	if err != nil {
		return nil, 0, err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, 0, err
	}
	defer null.Close()
	child, err := os.StartProcess(self, append([]string{self}, o.arguments("supervise")...), &os.ProcAttr{
		Dir:   string(o.dir),
		Env:   []string{"PATH=" + os.Getenv("PATH"), "HOME=" + string(o.dir), "LANG=C.UTF-8"},
		Files: []*os.File{null, log, log, report},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, 0, err
	}
	return answer, child.Pid, nil
}

// isRunning asks the lock, which the kernel frees with its holder.
func isRunning(dir folder) bool {
	lock, err := os.OpenFile(dir.path("lock"), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer lock.Close()
	return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

// down stops the supervisor of DIR, and ends what a killed one left behind.
func down(arguments []string) error {
	o, err := parseOptions("down", arguments)
	if err != nil {
		return err
	}
	if _, err := os.Stat(o.dir.path("lock")); err != nil {
		return fmt.Errorf("%s holds no cluster", o.dir)
	}
	if isRunning(o.dir) {
		content, err := os.ReadFile(o.dir.path("lock"))
		if err != nil {
			return err
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
		if err != nil {
			return fmt.Errorf("read %s: %w", o.dir.path("lock"), err)
		}
		stopSupervisor(o.dir, pid)
	}
	sweepFolder(o.dir)
	return nil
}

func stopSupervisor(dir folder, pid int) {
	_ = syscall.Kill(pid, syscall.SIGTERM)
	for start := time.Now(); isRunning(dir); time.Sleep(20 * time.Millisecond) {
		if time.Since(start) > 30*time.Second {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}
