package main

// A stand-in for kube-proxy: one local URL per Service. Connections are handed
// to the ready endpoints in turn, each for its whole life, so that clients with
// keep-alive stay where they are, as behind a real Service.

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/probe"
)

const urlAnnotation = "cluster.specdecode.io/url"

type balancer struct {
	agent     *agent
	endpoints discoverylisters.EndpointSliceLister

	mu     sync.Mutex
	fronts map[types.UID]*front
}

// front is the listener of one Service.
type front struct {
	balancer *balancer
	uid      types.UID
	port     *reservedPort
	listener net.Listener

	mu      sync.Mutex
	service *v1.Service
	turn    int
}

func newBalancer(a *agent) *balancer {
	return &balancer{agent: a, fronts: map[types.UID]*front{}}
}

func (b *balancer) follow(factory informers.SharedInformerFactory) error {
	b.endpoints = factory.Discovery().V1().EndpointSlices().Lister()
	// The lister is filled by its informer, which must be asked for.
	factory.Discovery().V1().EndpointSlices().Informer()
	_, err := factory.Core().V1().Services().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { b.serviceChanged(object.(*v1.Service)) },
		UpdateFunc: func(_, object any) { b.serviceChanged(object.(*v1.Service)) },
		DeleteFunc: b.serviceGone,
	})
	return err
}

func (b *balancer) serviceChanged(service *v1.Service) {
	if len(service.Spec.Selector) == 0 || len(service.Spec.Ports) == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	f, known := b.fronts[service.UID]
	if !known {
		var err error
		if f, err = newFront(b, service); err != nil {
			log.Printf("service %s/%s: %v", service.Namespace, service.Name, err)
			return
		}
		b.fronts[service.UID] = f
		go f.serve()
	}
	f.mu.Lock()
	f.service = service
	f.mu.Unlock()
	// Published again when somebody has removed it.
	if service.Annotations[urlAnnotation] != f.url() {
		go f.publish(service)
	}
}

func (b *balancer) serviceGone(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	service, ok := object.(*v1.Service)
	if !ok {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if f, known := b.fronts[service.UID]; known {
		delete(b.fronts, service.UID)
		f.listener.Close()
		f.port.release()
	}
}

func newFront(b *balancer, service *v1.Service) (*front, error) {
	port, err := reservePort()
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port.number))
	if err != nil {
		port.release()
		return nil, err
	}
	return &front{balancer: b, uid: service.UID, port: port, listener: listener, service: service}, nil
}

func (f *front) url() string { return fmt.Sprintf("http://127.0.0.1:%d", f.port.number) }

func (f *front) publish(service *v1.Service) {
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": service.UID, "annotations": map[string]string{urlAnnotation: f.url()},
	}})
	_, err := f.balancer.agent.client.CoreV1().Services(service.Namespace).Patch(
		f.balancer.agent.ctx, service.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		log.Printf("publish URL of service %s/%s: %v", service.Namespace, service.Name, err)
	}
}

func (f *front) serve() {
	for {
		client, err := f.listener.Accept()
		if err != nil {
			return
		}
		go f.connect(client)
	}
}

// connect resets the client when there is no endpoint, as kube-proxy refuses.
func (f *front) connect(client net.Conn) {
	defer client.Close()
	port := f.nextPort()
	if port == 0 {
		refuse(client)
		return
	}
	server, err := f.balancer.agent.dialPod(port)
	if err != nil {
		refuse(client)
		return
	}
	defer server.Close()
	done := make(chan struct{}, 2)
	go copyHalf(server, client, done)
	go copyHalf(client, server, done)
	<-done
	<-done
}

func refuse(client net.Conn) { _ = client.(*net.TCPConn).SetLinger(0) }

// copyHalf passes on the end of one direction and leaves the other open.
func copyHalf(to, from net.Conn, done chan<- struct{}) {
	_, err := io.Copy(to, from)
	if err != nil {
		_ = from.SetDeadline(time.Now())
		_ = to.SetDeadline(time.Now())
	}
	_ = to.(*net.TCPConn).CloseWrite()
	done <- struct{}{}
}

// nextPort is the real port of the next ready endpoint, or 0.
func (f *front) nextPort() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	ports := f.balancer.readyPorts(f.service)
	if len(ports) == 0 {
		return 0
	}
	f.turn++
	return ports[f.turn%len(ports)]
}

// readyPorts trusts the EndpointSlices for who is ready, and the runners for
// where: the slices' port is the one that the pod believes in.
func (b *balancer) readyPorts(service *v1.Service) []int {
	selector := labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: service.Name})
	found, err := b.endpoints.EndpointSlices(service.Namespace).List(selector)
	if err != nil {
		return nil
	}
	var ports []int
	seen := map[int]bool{}
	for _, slice := range found {
		for _, endpoint := range slice.Endpoints {
			if endpoint.TargetRef == nil || endpoint.Conditions.Ready != nil && !*endpoint.Conditions.Ready {
				continue
			}
			port := b.realPort(endpoint.TargetRef.UID, &service.Spec.Ports[0])
			if port != 0 && !seen[port] {
				seen[port] = true
				ports = append(ports, port)
			}
		}
	}
	// The lister's order changes; turns need one that does not.
	slices.Sort(ports)
	return ports
}

func (b *balancer) realPort(uid types.UID, port *v1.ServicePort) int {
	runner := b.agent.runnerByUID(uid)
	if runner == nil {
		return 0
	}
	for _, c := range runner.main {
		if declared, err := probe.ResolveContainerPort(port.TargetPort, c.spec); err == nil {
			if own, ok := runner.realPort(declared); ok {
				return own
			}
		}
	}
	return 0
}
