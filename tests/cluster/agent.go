package main

// The agent plays the part of a kubelet and a kube-proxy for every node of the
// cluster. It follows all pods by one watch and gives each pod that is bound to
// one of its nodes a runner of its own.
//
// virtual-kubelet keeps the nodes alive and speaks the kubelet's HTTP API. Its
// pod controller is not used: it writes whole pods back, so that an annotation
// changed meanwhile by somebody else could be undone.

import (
	"context"
	"fmt"
	"log"
	"maps"
	"net/url"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	listersv1 "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
)

type agent struct {
	options
	ctx       context.Context
	client    kubernetes.Interface
	apiserver *url.URL
	services  listersv1.ServiceLister
	podIP     string
	// recorders holds one source of Events per node; its keys are our nodes.
	recorders map[string]record.EventRecorder

	mu      sync.Mutex
	runners map[types.UID]*podRunner
}

func runAgent(arguments []string) error {
	o, err := parseOptions("agent", arguments)
	if err != nil {
		return err
	}
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := becomeParent(); err != nil {
		return err
	}
	client, err := newClient(o.dir, "agent")
	if err != nil {
		return err
	}
	go watchOOMKills(ctx)
	a := &agent{
		options: o, ctx: ctx, client: client, apiserver: client.Discovery().RESTClient().Get().URL(), podIP: machineAddress(),
		recorders: map[string]record.EventRecorder{}, runners: map[types.UID]*podRunner{},
	}
	if err := a.run(); err != nil {
		return err
	}
	<-ctx.Done()
	a.stopPods()
	return nil
}

func (a *agent) run() error {
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: a.client.CoreV1().Events("")})
	for _, name := range nodeNames(a.nodes) {
		a.recorders[name] = broadcaster.NewRecorder(scheme.Scheme, v1.EventSource{Component: "kubelet", Host: name})
	}
	if err := a.serveKubelet(); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(a.client, 0)
	a.services = factory.Core().V1().Services().Lister()
	pods := factory.Core().V1().Pods().Informer()
	balancer := newBalancer(a)
	if err := balancer.follow(factory); err != nil {
		return err
	}
	factory.Start(a.ctx.Done())
	// Service links go into the environment of the first pod already.
	factory.WaitForCacheSync(a.ctx.Done())
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { a.podChanged(object.(*v1.Pod)) },
		UpdateFunc: func(_, object any) { a.podChanged(object.(*v1.Pod)) },
		DeleteFunc: a.podGone,
	}); err != nil {
		return err
	}
	for name := range a.recorders {
		go func() {
			err := runNode(a.ctx, a.client, buildNode(name, a.gpus, a.kubeletPort))
			if err != nil && a.ctx.Err() == nil {
				log.Fatalf("node %s: %v", name, err)
			}
		}()
	}
	return nil
}

// podChanged starts a runner for a new pod of ours, or tells it the news.
func (a *agent) podChanged(pod *v1.Pod) {
	recorder, ours := a.recorders[pod.Spec.NodeName]
	if !ours {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	runner, known := a.runners[pod.UID]
	if !known {
		if pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed {
			return
		}
		runner = newPodRunner(a, pod, recorder)
		a.runners[pod.UID] = runner
		go func() {
			runner.run()
			a.mu.Lock()
			defer a.mu.Unlock()
			delete(a.runners, pod.UID)
		}()
	}
	runner.update(pod)
}

// podGone means that the object is no more: by our own doing, or by force.
func (a *agent) podGone(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	pod, ok := object.(*v1.Pod)
	if !ok {
		return
	}
	if runner := a.runnerByUID(pod.UID); runner != nil {
		runner.terminate(0)
	}
}

func (a *agent) runnerByUID(uid types.UID) *podRunner {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runners[uid]
}

func (a *agent) runnerByName(namespace, name string) (*podRunner, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, runner := range a.runners {
		if pod := runner.current(); pod.Namespace == namespace && pod.Name == name {
			return runner, nil
		}
	}
	return nil, fmt.Errorf("pod %s/%s is not running here", namespace, name)
}

// stopPods ends all processes when the cluster stops: asked first, then killed.
func (a *agent) stopPods() {
	a.mu.Lock()
	runners := slices.Collect(maps.Values(a.runners))
	a.mu.Unlock()
	for _, runner := range runners {
		runner.terminate(2 * time.Second)
	}
	for _, runner := range runners {
		<-runner.stopped
	}
	killMarked(a.dir.path("pods"))
}
