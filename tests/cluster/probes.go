package main

// Startup, liveness and readiness probes, and lifecycle hooks, which ask the
// same questions.

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/kubernetes/pkg/probe"
	httpprobe "k8s.io/kubernetes/pkg/probe/http"
	tcpprobe "k8s.io/kubernetes/pkg/probe/tcp"
)

var (
	askHTTP = httpprobe.New(false)
	askTCP  = tcpprobe.New()
)

// runProbes follows one instance until ctx ends. What must end the instance is
// written to unhealthy.
func (c *container) runProbes(ctx context.Context, run *instance, unhealthy chan<- string) {
	if c.spec.StartupProbe != nil {
		if !c.waitForStartup(ctx, run, unhealthy) {
			return
		}
		c.set(func(status *v1.ContainerStatus) {
			yes := true
			status.Started = &yes
			status.Ready = c.spec.ReadinessProbe == nil && status.State.Running != nil
		})
		c.declareStarted()
	}
	if c.spec.LivenessProbe != nil {
		go c.watchProbe(ctx, run, "Liveness", c.spec.LivenessProbe, func(good bool) bool {
			if !good {
				unhealthy <- "failed liveness probe"
			}
			return good
		})
	}
	if c.spec.ReadinessProbe != nil {
		c.watchProbe(ctx, run, "Readiness", c.spec.ReadinessProbe, func(good bool) bool {
			c.set(func(status *v1.ContainerStatus) { status.Ready = good && status.State.Running != nil })
			return true
		})
	}
}

func (c *container) waitForStartup(ctx context.Context, run *instance, unhealthy chan<- string) bool {
	started := false
	c.watchProbe(ctx, run, "Startup", c.spec.StartupProbe, func(good bool) bool {
		started = good
		if !good {
			unhealthy <- "failed startup probe"
		}
		return false
	})
	return started
}

// watchProbe calls verdict each time a threshold is reached, until it says
// false or ctx ends.
func (c *container) watchProbe(ctx context.Context, run *instance, kind string, p *v1.Probe, verdict func(good bool) bool) {
	pause := time.Duration(p.InitialDelaySeconds) * time.Second
	var inRow int32
	last := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = time.Duration(max(p.PeriodSeconds, 1)) * time.Second
		err := c.ask(ctx, run, &p.ProbeHandler, time.Duration(max(p.TimeoutSeconds, 1))*time.Second)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			c.event(v1.EventTypeWarning, "Unhealthy", "%s probe failed: %v", kind, err)
		}
		if good := err == nil; good != last {
			last, inRow = good, 0
		}
		inRow++
		threshold := p.FailureThreshold
		if last {
			threshold = p.SuccessThreshold
		}
		if inRow == max(threshold, 1) && !verdict(last) {
			return
		}
	}
}

// ask puts one probe's question; nil is a good answer.
func (c *container) ask(ctx context.Context, run *instance, p *v1.ProbeHandler, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case p.Exec != nil:
		return c.askCommand(ctx, run, p.Exec.Command)
	case p.HTTPGet != nil:
		return c.atEitherAddress(p.HTTPGet.Host, p.HTTPGet.Port, func(host string, port int) (probe.Result, string, error) {
			request, err := c.httpRequest(ctx, p.HTTPGet, host, port)
			if err != nil {
				return probe.Unknown, "", err
			}
			return askHTTP.Probe(request, timeout)
		})
	case p.TCPSocket != nil:
		return c.atEitherAddress(p.TCPSocket.Host, p.TCPSocket.Port, func(host string, port int) (probe.Result, string, error) {
			return askTCP.Probe(host, port, timeout)
		})
	}
	return fmt.Errorf("this kind of probe is not supported by the process node: use exec, httpGet or tcpSocket")
}

func (c *container) askCommand(ctx context.Context, run *instance, command []string) error {
	var output bytes.Buffer
	code, err := c.runCommand(ctx, run, command, streams{out: &output})
	if err != nil {
		return fmt.Errorf("command %q: %w", strings.Join(command, " "), err)
	}
	if code != 0 {
		return fmt.Errorf("command %q exited with %d: %s", strings.Join(command, " "), code, output.String())
	}
	return nil
}

func (c *container) httpRequest(ctx context.Context, action *v1.HTTPGetAction, host string, port int) (*http.Request, error) {
	there := *action
	there.Host, there.Port = host, intstr.FromInt(port)
	request, err := httpprobe.NewRequestForHTTPGetAction(&there, c.spec, host, "probe")
	if err != nil {
		return nil, err
	}
	return request.WithContext(ctx), nil
}

// atEitherAddress asks on loopback and, if nobody answers there, on the address
// that the pod reports: a process may have bound either.
func (c *container) atEitherAddress(host string, port intstr.IntOrString, ask func(string, int) (probe.Result, string, error)) error {
	number, err := c.realPort(port)
	if err != nil {
		return err
	}
	hosts := []string{"127.0.0.1", c.pod.agent.podIP}
	if host != "" {
		hosts = []string{host}
	}
	var answer string
	for _, host := range hosts {
		result, said, err := ask(host, number)
		if err == nil && result != probe.Failure && result != probe.Unknown {
			return nil
		}
		// The first refusal says more than the second.
		if answer == "" {
			answer = said
			if err != nil {
				answer = err.Error()
			}
		}
		if strings.HasPrefix(said, "HTTP probe failed with statuscode") {
			return fmt.Errorf("%s", said)
		}
	}
	return fmt.Errorf("%s", answer)
}

// realPort resolves a port's name or number to the one of the process.
func (c *container) realPort(port intstr.IntOrString) (int, error) {
	declared, err := probe.ResolveContainerPort(port, c.spec)
	if err != nil {
		return 0, err
	}
	if own, ok := c.pod.realPort(declared); ok {
		return own, nil
	}
	return declared, nil
}

// runHook runs a preStop or postStart hook.
func (c *container) runHook(ctx context.Context, run *instance, hook *v1.LifecycleHandler) error {
	switch {
	case hook.Exec != nil:
		return c.askCommand(ctx, run, hook.Exec.Command)
	case hook.HTTPGet != nil:
		return c.ask(ctx, run, &v1.ProbeHandler{HTTPGet: hook.HTTPGet}, time.Minute)
	case hook.Sleep != nil:
		select {
		case <-time.After(time.Duration(hook.Sleep.Seconds) * time.Second):
		case <-run.process.done:
		case <-ctx.Done():
		}
		return nil
	}
	return fmt.Errorf("this kind of hook is not supported by the process node: use exec, httpGet or sleep")
}
