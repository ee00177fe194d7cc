package main

// The kubelet's HTTP API, for "kubectl logs", "exec" and "port-forward". Only
// the API server's certificate opens it.

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
	utilexec "k8s.io/utils/exec"
)

func (a *agent) serveKubelet() error {
	certificate, err := tls.LoadX509KeyPair(a.dir.pki("agent.crt"), a.dir.pki("agent.key"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(a.dir.pki("ca.crt"))
	if err != nil {
		return err
	}
	callers := x509.NewCertPool()
	callers.AppendCertsFromPEM(ca)
	listener, err := tls.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", a.kubeletPort), &tls.Config{
		Certificates: []tls.Certificate{certificate},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    callers,
		MinVersion:   tls.VersionTLS12,
	})
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: api.PodHandler(api.PodHandlerConfig{
			RunInContainer:        a.execInContainer,
			PortForward:           a.forwardPort,
			GetContainerLogs:      a.containerLogs,
			GetPodsFromKubernetes: a.listPods,
			StreamIdleTimeout:     4 * time.Hour,
		}, false),
		ReadHeaderTimeout: 30 * time.Second,
		ErrorLog:          stdlog.New(io.Discard, "", 0),
	}
	go func() {
		if err := server.Serve(listener); a.ctx.Err() == nil {
			stdlog.Fatalf("kubelet API: %v", err)
		}
	}()
	return nil
}

func (a *agent) listPods(context.Context) ([]*v1.Pod, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var pods []*v1.Pod
	for _, runner := range a.runners {
		pods = append(pods, runner.current())
	}
	return pods, nil
}

func (a *agent) findContainer(namespace, pod, name string) (*container, error) {
	runner, err := a.runnerByName(namespace, pod)
	if err != nil {
		return nil, errdefs.AsNotFound(err)
	}
	for _, c := range append(append([]*container{}, runner.init...), runner.main...) {
		if c.spec.Name == name {
			return c, nil
		}
	}
	return nil, errdefs.NotFoundf("container %s is not in pod %s/%s", name, namespace, pod)
}

func (a *agent) execInContainer(ctx context.Context, namespace, pod, name string, command []string, attach api.AttachIO) error {
	c, err := a.findContainer(namespace, pod, name)
	if err != nil {
		return err
	}
	c.pod.mu.Lock()
	run := c.running
	c.pod.mu.Unlock()
	if run == nil {
		return errdefs.NotFoundf("container %s is not running", name)
	}
	s := streams{in: attach.Stdin(), out: io.Discard, err: io.Discard}
	if out := attach.Stdout(); out != nil {
		s.out, s.err = out, out
	}
	if err := attach.Stderr(); err != nil {
		s.err = err
	}
	code, err := c.runCommand(ctx, run, command, s)
	if err != nil {
		return err
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("exit status %d", code), Code: int(code)}
	}
	return nil
}

// forwardPort copies until either side ends.
func (a *agent) forwardPort(_ context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error {
	defer stream.Close()
	runner, err := a.runnerByName(namespace, pod)
	if err != nil {
		return errdefs.AsNotFound(err)
	}
	target, ok := runner.realPort(int(port))
	if !ok {
		return errdefs.NotFoundf("port %d is not declared by pod %s/%s", port, namespace, pod)
	}
	connection, err := a.dialPod(target)
	if err != nil {
		return err
	}
	defer connection.Close()
	done := make(chan struct{}, 2)
	go pump(connection, stream, done)
	go pump(stream, connection, done)
	<-done
	return nil
}

// dialPod reaches a port of a pod on whichever address its process has bound.
func (a *agent) dialPod(port int) (net.Conn, error) {
	connection, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err == nil {
		return connection, nil
	}
	return net.Dial("tcp", net.JoinHostPort(a.podIP, fmt.Sprint(port)))
}

func (a *agent) containerLogs(ctx context.Context, namespace, pod, name string, options api.ContainerLogOpts) (io.ReadCloser, error) {
	if options.Timestamps || options.SinceSeconds > 0 || !options.SinceTime.IsZero() {
		return nil, errdefs.InvalidInput("the process node keeps no times beside log lines: leave out --timestamps and --since")
	}
	c, err := a.findContainer(namespace, pod, name)
	if err != nil {
		return nil, err
	}
	number, err := c.logNumber(options.Previous)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(c.folder(number), "log")
	// No tail asked for and --tail=0 look alike here: both show all.
	lines := options.Tail
	if lines == 0 {
		lines = -1
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(file)
	if err != nil {
		file.Close()
		return nil, err
	}
	start := bytes.NewReader(lastLines(content, lines))
	if !options.Follow {
		return &logStream{Reader: limited(start, options.LimitBytes), file: file}, nil
	}
	rest := &follower{ctx: ctx, file: file, ended: func() bool { return !c.isRunning(number) }}
	return &logStream{Reader: limited(io.MultiReader(start, rest), options.LimitBytes), file: file}, nil
}

func limited(reader io.Reader, bytes int) io.Reader {
	if bytes > 0 {
		return io.LimitReader(reader, int64(bytes))
	}
	return reader
}

// logNumber finds the run whose log is asked for.
func (c *container) logNumber(previous bool) (int, error) {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	state, last := c.status.State, c.status.LastTerminationState
	number := int(c.status.RestartCount)
	switch {
	case previous && last.Terminated == nil:
		return 0, errdefs.NotFoundf("previous terminated container %q not found", c.spec.Name)
	case previous && state.Waiting == nil:
		return number - 1, nil
	case state.Waiting != nil && last.Terminated == nil:
		return 0, errdefs.InvalidInputf("container %q is waiting to start: %s", c.spec.Name, state.Waiting.Reason)
	}
	return number, nil
}

func (c *container) isRunning(number int) bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return c.running != nil && c.running.number == number
}

type logStream struct {
	io.Reader
	file *os.File
}

func (s *logStream) Close() error { return s.file.Close() }

// follower reads on at the end of a growing file.
type follower struct {
	ctx   context.Context
	file  *os.File
	ended func() bool
}

func (f *follower) Read(buffer []byte) (int, error) {
	for {
		// Asked before the read, so that the last lines are not missed.
		ended := f.ended()
		count, err := f.file.Read(buffer)
		if count > 0 || err != io.EOF {
			return count, err
		}
		if ended {
			return 0, io.EOF
		}
		select {
		case <-f.ctx.Done():
			return 0, io.EOF
		case <-time.After(100 * time.Millisecond):
		}
	}
}
