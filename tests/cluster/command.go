package main

// Commands run beside a container's process: exec probes, hooks, kubectl exec.

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

type streams struct {
	in       io.Reader
	out, err io.Writer
}

// runCommand runs argv in the environment of a running instance and returns its
// exit code. When ctx ends, the command and its group are killed.
func (c *container) runCommand(ctx context.Context, run *instance, argv []string, s streams) (int32, error) {
	rewriter, err := c.buildRewriter(&launch{messagePath: run.messagePath}, nil)
	if err != nil {
		return 0, err
	}
	var files, ours []*os.File
	defer func() { closeAll(ours) }()
	in, err := inputFile(s.in)
	if err != nil {
		return 0, err
	}
	files = append(files, in)
	copied := make(chan struct{}, 2)
	for _, writer := range []io.Writer{s.out, s.err} {
		ourEnd, theirEnd, err := os.Pipe()
		if err != nil {
			closeAll(files)
			return 0, err
		}
		files, ours = append(files, theirEnd), append(ours, ourEnd)
		go pump(writer, ourEnd, copied)
	}
	started, err := startProcess(processSpec{
		argv: rewriter.Arguments(argv), env: run.environment, dir: filepath.Join(run.folder, "home"),
		files: files, deathsig: syscall.SIGKILL,
	})
	closeAll(files)
	if err != nil {
		return 0, err
	}
	select {
	case <-started.done:
	case <-ctx.Done():
		started.killGroup()
		<-started.done
		return started.exitCode(), ctx.Err()
	}
	// What the command left in the background may hold the pipes for ever.
	for range 2 {
		select {
		case <-copied:
		case <-time.After(time.Second):
		}
	}
	return started.exitCode(), nil
}

func pump(to io.Writer, from io.Reader, done chan<- struct{}) {
	if to == nil {
		to = io.Discard
	}
	_, _ = io.Copy(to, from)
	done <- struct{}{}
}

// inputFile is the end of a pipe that reader is copied into, or /dev/null.
func inputFile(reader io.Reader) (*os.File, error) {
	if reader == nil {
		return os.Open(os.DevNull)
	}
	theirEnd, ourEnd, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	go func() {
		defer ourEnd.Close()
		_, _ = io.Copy(ourEnd, reader)
	}()
	return theirEnd, nil
}

func closeAll(files []*os.File) {
	for _, file := range files {
		file.Close()
	}
}
