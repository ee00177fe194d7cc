package main

// One container of a pod: start, probes, stop, restart with back-off, and the
// record of how it ended.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
)

const (
	// A container that ran this long starts afresh in its back-off.
	steadyRun = 10 * time.Minute
	// After the grace period is over a container still gets this long between
	// SIGTERM and SIGKILL, if its preStop hook used up all of it.
	minimumGrace = 2 * time.Second
)

type container struct {
	pod  *podRunner
	spec *v1.Container

	// status is guarded by pod.mu; change it through set.
	status  v1.ContainerStatus
	running *instance
	started chan struct{}
}

// instance is one run of a container, with a folder of its own.
type instance struct {
	number      int
	folder      string
	logPath     string
	messagePath string
	environment []string
	process     *process
	startedAt   time.Time
}

// ending says how an instance ended.
type ending struct {
	code    int32
	reason  string
	message string
}

// notYet is a reason to wait before a container can be started.
type notYet struct {
	reason  string
	message string
}

func (n *notYet) Error() string { return n.message }

func newContainer(p *podRunner, spec *v1.Container) *container {
	no := false
	c := &container{pod: p, spec: spec, started: make(chan struct{})}
	c.status = v1.ContainerStatus{
		Name: spec.Name, Image: spec.Image, Started: &no,
		State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "PodInitializing"}},
	}
	if len(p.current().Spec.InitContainers) == 0 {
		c.status.State.Waiting.Reason = "ContainerCreating"
	}
	return c
}

// set changes the status and has it reported; change runs with pod.mu held.
func (c *container) set(change func(status *v1.ContainerStatus)) {
	c.pod.mu.Lock()
	change(&c.status)
	c.pod.mu.Unlock()
	poke(c.pod.statusChanged)
}

func (c *container) event(kind, reason, format string, arguments ...any) {
	c.pod.recorder.Eventf(c.pod.current(), kind, reason, format, arguments...)
}

// run starts the container again and again, as its restart policy says, until
// it has ended for good or life is over.
func (c *container) run(life context.Context) {
	delays := restartDelays{base: c.pod.agent.restartBackoff}
	for number := 0; ; number++ {
		end, uptime := c.runOnce(life, number)
		if end == nil || life.Err() != nil || !c.restarts(end.code) {
			return
		}
		if delay := delays.next(uptime); delay > 0 && !c.backOff(life, delay) {
			return
		}
	}
}

// restarts says whether the policy asks for another run after this exit code.
func (c *container) restarts(code int32) bool {
	pod := c.pod.current()
	if podutil.IsRestartableInitContainer(c.spec) {
		return true
	}
	isInit := pod.Spec.RestartPolicy == v1.RestartPolicyAlways && c.isInit()
	if isInit && code == 0 {
		return false
	}
	return podutil.ContainerShouldRestart(*c.spec, pod.Spec, code)
}

func (c *container) isInit() bool {
	for _, other := range c.pod.init {
		if other == c {
			return true
		}
	}
	return false
}

// runOnce returns nil when the container could not be started before life ended.
func (c *container) runOnce(life context.Context, number int) (*ending, time.Duration) {
	run, err := c.start(life, number)
	if run == nil {
		return nil, 0
	}
	var end *ending
	if err != nil {
		end = &ending{code: 128, reason: "StartError", message: err.Error()}
		c.event(v1.EventTypeWarning, "Failed", "Error: %v", err)
	} else {
		end = c.attend(life, run)
	}
	c.recordEnd(run, end)
	// Told first, since this takes a look at every process of the machine.
	killMarked(run.folder)
	return end, time.Since(run.startedAt)
}

// start waits for the image and the configuration, then starts the process. An
// error beside an instance means that the program could not be executed.
func (c *container) start(life context.Context, number int) (*instance, error) {
	pulls := 0
	var launch *launch
	for {
		var err error
		if life.Err() != nil {
			return nil, nil
		}
		if launch, err = c.prepareLaunch(life, number); err == nil {
			break
		}
		pause := time.Second
		var wait *notYet
		if !errors.As(err, &wait) {
			wait = &notYet{reason: "CreateContainerConfigError", message: err.Error()}
		}
		if wait.reason == "ErrImagePull" {
			pulls++
			pause = c.waitForImage(wait, pulls)
		} else {
			c.waiting(wait.reason, wait.message)
			c.event(v1.EventTypeWarning, "Failed", "Error: %s", wait.message)
		}
		select {
		case <-life.Done():
			return nil, nil
		case <-time.After(pause):
		}
	}
	return c.execute(launch)
}

// waitForImage tells of a failed pull first, then of waiting for the next one,
// and returns how long to wait before looking again.
func (c *container) waitForImage(wait *notYet, pulls int) time.Duration {
	const look = 200 * time.Millisecond
	backOffFrom := 1 + int(c.pod.agent.restartBackoff/look)
	switch pulls {
	case 1:
		c.waiting("ErrImagePull", wait.message)
		c.event(v1.EventTypeWarning, "Failed", "Failed to pull image %q: %s", c.spec.Image, wait.message)
		c.event(v1.EventTypeWarning, "Failed", "Error: ErrImagePull")
	case backOffFrom:
		message := fmt.Sprintf("Back-off pulling image %q: %s", c.spec.Image, wait.message)
		c.waiting("ImagePullBackOff", message)
		c.event(v1.EventTypeNormal, "BackOff", "%s", message)
		c.event(v1.EventTypeWarning, "Failed", "Error: ImagePullBackOff")
	}
	return look
}

func (c *container) waiting(reason, message string) {
	c.set(func(status *v1.ContainerStatus) {
		setState(status, v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: reason, Message: message}})
	})
}

// setState keeps the record of an ended run when another state follows it.
func setState(status *v1.ContainerStatus, state v1.ContainerState) {
	if status.State.Terminated != nil {
		status.LastTerminationState = status.State
	}
	status.State = state
}

// execute starts the process with its output going straight into the log file.
func (c *container) execute(l *launch) (*instance, error) {
	run := &instance{
		number: l.number, folder: l.folder, messagePath: l.messagePath, environment: l.environment,
		logPath: filepath.Join(l.folder, "log"), startedAt: time.Now(),
	}
	log, err := os.OpenFile(run.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return run, err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return run, err
	}
	defer null.Close()
	run.process, err = startProcess(processSpec{
		argv: l.argv, env: l.environment, dir: l.workdir,
		files: []*os.File{null, log, log}, deathsig: syscall.SIGKILL,
	})
	if err != nil {
		return run, fmt.Errorf("start %s: %w", l.argv[0], err)
	}
	c.recordStart(run, l)
	return run, nil
}

func (c *container) recordStart(run *instance, l *launch) {
	started := c.spec.StartupProbe == nil
	id := c.id(run)
	c.set(func(status *v1.ContainerStatus) {
		c.running = run
		status.RestartCount = int32(run.number)
		setState(status, v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: metav1.NewTime(run.startedAt)}})
		status.ImageID = l.imageID
		status.ContainerID = id
		status.Started = &started
		status.Ready = started && c.spec.ReadinessProbe == nil
	})
	c.event(v1.EventTypeNormal, "Started", "Container started: %s", c.spec.Name)
	if started {
		c.declareStarted()
	}
}

func (c *container) id(run *instance) string {
	return fmt.Sprintf("process://%s/%s/%d", c.pod.current().UID, c.spec.Name, run.number)
}

// declareStarted lets the container after a sidecar go on.
func (c *container) declareStarted() {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	select {
	case <-c.started:
	default:
		close(c.started)
	}
}

func (c *container) waitStarted(life context.Context) bool {
	select {
	case <-c.started:
		return true
	case <-life.Done():
		return false
	}
}

// attend watches a running instance until all of it is gone.
func (c *container) attend(life context.Context, run *instance) *ending {
	probing, stopProbes := context.WithCancel(c.pod.grace)
	defer stopProbes()
	unhealthy := make(chan string, 3)
	go c.runPostStart(probing, unhealthy)
	go c.runProbes(probing, run, unhealthy)
	select {
	case <-run.process.done:
	case <-life.Done():
		c.event(v1.EventTypeNormal, "Killing", "Stopping container %s", c.spec.Name)
		c.stopAtEndOfLife(run)
	case why := <-unhealthy:
		c.event(v1.EventTypeNormal, "Killing", "Container %s %s, will be restarted", c.spec.Name, why)
		grace, cancel := context.WithTimeout(c.pod.grace, c.probeGrace())
		c.stop(grace, run)
		cancel()
	}
	// A container ends with its first process, whatever that one started.
	run.process.killGroup()
	return c.judge(run)
}

// probeGrace is how long a container may take to stop after a failed probe.
func (c *container) probeGrace() time.Duration {
	for _, probe := range []*v1.Probe{c.spec.LivenessProbe, c.spec.StartupProbe} {
		if probe != nil && probe.TerminationGracePeriodSeconds != nil {
			return time.Duration(*probe.TerminationGracePeriodSeconds) * time.Second
		}
	}
	return c.pod.gracePeriod()
}

// stopAtEndOfLife stops at the pace of the pod's deletion; a sidecar that is no
// longer needed in a pod that stays has the same time for itself.
func (c *container) stopAtEndOfLife(run *instance) {
	grace, cancel := c.pod.grace, func() {}
	if c.pod.starting.Err() == nil {
		grace, cancel = context.WithTimeout(grace, c.pod.gracePeriod())
	}
	defer cancel()
	c.stop(grace, run)
}

// stop runs the preStop hook, asks the process to end and kills it when grace
// is over.
func (c *container) stop(grace context.Context, run *instance) {
	if hook := c.spec.Lifecycle; hook != nil && hook.PreStop != nil && grace.Err() == nil {
		if err := c.runHook(grace, run, hook.PreStop); err != nil && grace.Err() == nil {
			c.event(v1.EventTypeWarning, "FailedPreStopHook", "PreStopHook failed: %v", err)
		}
		if grace.Err() != nil {
			run.process.signal(syscall.SIGTERM)
			run.process.exitedWithin(minimumGrace)
		}
	}
	if grace.Err() == nil {
		run.process.signal(syscall.SIGTERM)
	}
	select {
	case <-run.process.done:
	case <-grace.Done():
		run.process.killGroup()
		<-run.process.done
	}
}

// runPostStart treats a failed hook as a kubelet does: the container is killed.
func (c *container) runPostStart(ctx context.Context, unhealthy chan<- string) {
	if c.spec.Lifecycle == nil || c.spec.Lifecycle.PostStart == nil {
		return
	}
	c.pod.mu.Lock()
	run := c.running
	c.pod.mu.Unlock()
	if err := c.runHook(ctx, run, c.spec.Lifecycle.PostStart); err != nil && ctx.Err() == nil {
		c.event(v1.EventTypeWarning, "FailedPostStartHook", "PostStartHook failed: %v", err)
		unhealthy <- "failed its postStart hook"
	}
}

// judge reads how a finished instance ended.
func (c *container) judge(run *instance) *ending {
	end := &ending{code: run.process.exitCode(), reason: "Error"}
	if end.code == 0 {
		end.reason = "Completed"
	}
	if run.process.status.Signaled() && run.process.status.Signal() == syscall.SIGKILL && kernelKilledForMemory() {
		end.reason = "OOMKilled"
	}
	end.message = terminationMessage(run, c.spec.TerminationMessagePolicy, end.code)
	return end
}

func (c *container) recordEnd(run *instance, end *ending) {
	terminated := &v1.ContainerStateTerminated{
		ExitCode: end.code, Reason: end.reason, Message: end.message, ContainerID: c.id(run),
		StartedAt: metav1.NewTime(run.startedAt), FinishedAt: metav1.Now(),
	}
	no := false
	c.set(func(status *v1.ContainerStatus) {
		c.running = nil
		status.RestartCount = int32(run.number)
		setState(status, v1.ContainerState{Terminated: terminated})
		status.Ready, status.Started = c.isInit() && end.code == 0, &no
	})
	// The log of the run before this one can still be asked for.
	_ = os.RemoveAll(c.folder(run.number - 2))
}

// backOff waits for the next restart; false means that life is over.
func (c *container) backOff(life context.Context, delay time.Duration) bool {
	pod := c.pod.current()
	message := fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)",
		delay, c.spec.Name, pod.Name, pod.Namespace, pod.UID)
	c.waiting("CrashLoopBackOff", message)
	c.event(v1.EventTypeWarning, "BackOff", "Back-off restarting failed container %s in pod %s", c.spec.Name, pod.Name)
	select {
	case <-life.Done():
		return false
	case <-time.After(delay):
		return true
	}
}

func (c *container) succeeded() bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	terminated := c.status.State.Terminated
	return terminated != nil && terminated.ExitCode == 0
}

// folder is where the files of a run go.
func (c *container) folder(number int) string {
	return c.pod.folder.path("containers", c.spec.Name, strconv.Itoa(number))
}

// restartDelays restarts once without delay, then doubles from base up to 30
// times base, as a kubelet does from 10 s up to 5 min.
type restartDelays struct {
	base    time.Duration
	crashes int
}

func (d *restartDelays) next(uptime time.Duration) time.Duration {
	if uptime > steadyRun {
		d.crashes = 0
	}
	d.crashes++
	if d.crashes == 1 {
		return 0
	}
	delay := d.base
	for i := 2; i < d.crashes && delay < 30*d.base; i++ {
		delay *= 2
	}
	return min(delay, 30*d.base)
}
