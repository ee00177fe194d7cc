package main

// The life of one pod: ports, volumes, init containers, containers, deletion.

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
)

const (
	portsAnnotation          = "cluster.specdecode.io/ports"
	prometheusPortAnnotation = "prometheus.io/port"
	// A kubelet looks at its volumes once in about a minute, and whenever the
	// pod changes.
	volumeRefreshPeriod = time.Minute
)

type podRunner struct {
	agent    *agent
	recorder record.EventRecorder
	folder   folder
	tokens   map[string]*podToken
	init     []*container
	main     []*container

	// starting ends when no process may be started any more, grace when the
	// processes that are left must die.
	starting, grace     context.Context
	stopStarting, expel context.CancelFunc

	objectChanged chan struct{}
	statusChanged chan struct{}
	stopped       chan struct{}
	reporting     sync.Mutex

	mu           sync.Mutex
	pod          *v1.Pod
	ports        map[int]*reservedPort // by containerPort
	volumes      map[string]string     // folder by name
	reported     v1.PodStatus
	volumesReady bool
	initialized  bool
}

func newPodRunner(a *agent, pod *v1.Pod, recorder record.EventRecorder) *podRunner {
	p := &podRunner{
		agent: a, recorder: recorder, folder: folder(a.dir.path("pods", string(pod.UID))),
		ports: map[int]*reservedPort{}, volumes: map[string]string{}, tokens: map[string]*podToken{},
		objectChanged: make(chan struct{}, 1), statusChanged: make(chan struct{}, 1),
		stopped: make(chan struct{}),
		pod:     pod, reported: *pod.Status.DeepCopy(),
	}
	p.starting, p.stopStarting = context.WithCancel(a.ctx)
	p.grace, p.expel = context.WithCancel(context.Background())
	for i := range pod.Spec.InitContainers {
		p.init = append(p.init, newContainer(p, &pod.Spec.InitContainers[i]))
	}
	for i := range pod.Spec.Containers {
		p.main = append(p.main, newContainer(p, &pod.Spec.Containers[i]))
	}
	return p
}

// current is the newest version of the object that we know; do not modify it.
func (p *podRunner) current() *v1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pod
}

// update takes a version of the object from the watch, or from a write of ours.
func (p *podRunner) update(pod *v1.Pod) {
	p.mu.Lock()
	old := p.pod
	if isOlder(pod, old) {
		p.mu.Unlock()
		return
	}
	p.pod = pod
	p.mu.Unlock()
	if pod.DeletionTimestamp != nil {
		seconds := int64(0)
		if pod.DeletionGracePeriodSeconds != nil {
			seconds = *pod.DeletionGracePeriodSeconds
		}
		p.terminate(time.Duration(seconds) * time.Second)
	}
	// Our own status reports come back too; they are no news for the volumes.
	if !equality.Semantic.DeepEqual(old.Annotations, pod.Annotations) ||
		!equality.Semantic.DeepEqual(old.Labels, pod.Labels) ||
		!equality.Semantic.DeepEqual(old.Spec, pod.Spec) {
		poke(p.objectChanged)
	}
	if len(pod.Spec.ReadinessGates) > 0 {
		poke(p.statusChanged)
	}
}

// isOlder guards against a watch that lags behind the answer to our own write.
func isOlder(pod, than *v1.Pod) bool {
	a, errA := strconv.ParseUint(pod.ResourceVersion, 10, 64)
	b, errB := strconv.ParseUint(than.ResourceVersion, 10, 64)
	return errA == nil && errB == nil && a < b
}

// poke sets a flag that another goroutine waits for.
func poke(flag chan struct{}) {
	select {
	case flag <- struct{}{}:
	default:
	}
}

// terminate stops the pod within that time. A later call may only shorten it.
func (p *podRunner) terminate(grace time.Duration) {
	p.stopStarting()
	if grace <= 0 {
		p.expel()
		return
	}
	time.AfterFunc(grace, p.expel)
}

// gracePeriod is how long the pod may take to stop, by its own word.
func (p *podRunner) gracePeriod() time.Duration {
	if seconds := p.current().Spec.TerminationGracePeriodSeconds; seconds != nil {
		return time.Duration(*seconds) * time.Second
	}
	return 30 * time.Second
}

// run returns when no process of the pod is left and its object is gone.
func (p *podRunner) run() {
	defer close(p.stopped)
	defer p.cleanUp()
	go p.keepReporting()
	if p.prepare() {
		go p.keepVolumesFresh()
		p.runContainers()
	}
	p.report()
	// A pod that ran to its end keeps its logs until it is deleted.
	<-p.starting.Done()
	p.deleteObject()
}

func (p *podRunner) cleanUp() {
	killMarked(string(p.folder))
	for _, port := range p.ports {
		port.release()
	}
	if p.agent.ctx.Err() == nil {
		_ = os.RemoveAll(string(p.folder))
	}
}

// prepare repeats until ports and volumes are there; false means: stopped.
func (p *podRunner) prepare() bool {
	for {
		err := p.prepareOnce()
		if err == nil {
			p.mu.Lock()
			p.volumesReady = true
			p.mu.Unlock()
			poke(p.statusChanged)
			return true
		}
		p.recorder.Event(p.current(), v1.EventTypeWarning, "FailedMount", err.Error())
		select {
		case <-p.starting.Done():
			return false
		case <-p.objectChanged:
		case <-time.After(time.Second):
		}
	}
}

func (p *podRunner) prepareOnce() error {
	if err := os.MkdirAll(string(p.folder), 0o700); err != nil {
		return err
	}
	if err := p.assignPorts(); err != nil {
		return err
	}
	return p.setUpVolumes()
}

// assignPorts gives each declared containerPort a free port of the machine and
// publishes them on the pod, so that others can find its processes.
func (p *podRunner) assignPorts() error {
	pod := p.current()
	numbers := map[string]int{}
	for container := range podutil.ContainerIter(&pod.Spec, podutil.Containers|podutil.InitContainers) {
		for _, declared := range container.Ports {
			inside := int(declared.ContainerPort)
			outside, err := p.assignPort(inside)
			if err != nil {
				return err
			}
			numbers[strconv.Itoa(inside)] = outside
		}
	}
	if len(numbers) == 0 || pod.Annotations[portsAnnotation] != "" {
		return nil
	}
	published, _ := json.Marshal(numbers)
	annotations := map[string]string{portsAnnotation: string(published)}
	if number, ok := numbers[pod.Annotations[prometheusPortAnnotation]]; ok {
		annotations[prometheusPortAnnotation] = strconv.Itoa(number)
	}
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	patched, err := p.agent.client.CoreV1().Pods(pod.Namespace).Patch(
		p.starting, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return err
	}
	p.update(patched)
	return nil
}

func (p *podRunner) assignPort(declared int) (int, error) {
	if port, ok := p.realPort(declared); ok {
		return port, nil
	}
	port, err := reservePort()
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ports[declared] = port
	return port.number, nil
}

// realPort is the port of this machine that stands for a containerPort.
func (p *podRunner) realPort(declared int) (int, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	port, ok := p.ports[declared]
	if !ok {
		return 0, false
	}
	return port.number, true
}

func (p *podRunner) keepVolumesFresh() {
	ticker := time.NewTicker(volumeRefreshPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-p.starting.Done():
			return
		case <-p.objectChanged:
		case <-ticker.C:
		}
		if err := p.setUpVolumes(); err != nil && p.starting.Err() == nil {
			p.recorder.Event(p.current(), v1.EventTypeWarning, "FailedMount", err.Error())
		}
	}
}

// runContainers returns when every container has ended for good.
func (p *podRunner) runContainers() {
	var sidecars, mains sync.WaitGroup
	stopSidecars := p.runInitContainers(&sidecars)
	defer sidecars.Wait()
	defer stopSidecars()
	p.mu.Lock()
	ok := p.initialized
	p.mu.Unlock()
	if !ok {
		return
	}
	poke(p.statusChanged)
	for _, c := range p.main {
		mains.Go(func() { c.run(p.starting) })
	}
	mains.Wait()
}

// runInitContainers runs them one after the other; a restartable one (a sidecar)
// stays, and the next follows once it has started.
func (p *podRunner) runInitContainers(sidecars *sync.WaitGroup) context.CancelFunc {
	life, stop := context.WithCancel(p.starting)
	for _, c := range p.init {
		if podutil.IsRestartableInitContainer(c.spec) {
			sidecars.Go(func() { c.run(life) })
			if !c.waitStarted(life) {
				return stop
			}
			continue
		}
		c.run(p.starting)
		if !c.succeeded() {
			return stop
		}
	}
	p.mu.Lock()
	p.initialized = p.starting.Err() == nil
	p.mu.Unlock()
	return stop
}

// deleteObject removes the object that the API server kept until we were done.
func (p *podRunner) deleteObject() {
	if p.agent.ctx.Err() != nil {
		return
	}
	pod := p.current()
	options := metav1.NewDeleteOptions(0)
	options.Preconditions = metav1.NewUIDPreconditions(string(pod.UID))
	for {
		err := p.agent.client.CoreV1().Pods(pod.Namespace).Delete(p.agent.ctx, pod.Name, *options)
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || errors.Is(err, context.Canceled) {
			return
		}
		log.Printf("delete pod %s/%s: %v", pod.Namespace, pod.Name, err)
		select {
		case <-p.agent.ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}
