package main

// What the API server is told of a pod. The status is computed from the
// containers as a whole and sent as a patch of the status subresource alone,
// so that nobody else's change of the pod is lost.

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
)

func (p *podRunner) keepReporting() {
	poke(p.statusChanged)
	for {
		select {
		case <-p.stopped:
			return
		case <-p.statusChanged:
		}
		if !p.report() {
			time.Sleep(100 * time.Millisecond)
			poke(p.statusChanged)
		}
	}
}

// report sends the present status when it differs from the last one sent. It
// says false when that must be tried again.
func (p *podRunner) report() bool {
	p.reporting.Lock()
	defer p.reporting.Unlock()
	p.mu.Lock()
	pod, old := p.pod, p.reported
	wanted := p.buildStatus()
	p.mu.Unlock()
	patch, err := statusPatch(pod.UID, old, wanted)
	if err != nil || patch == nil {
		return err == nil
	}
	ctx, cancel := context.WithTimeout(p.agent.ctx, 10*time.Second)
	defer cancel()
	patched, err := p.agent.client.CoreV1().Pods(pod.Namespace).Patch(
		ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	switch {
	case err == nil:
		p.mu.Lock()
		p.reported = patched.Status
		p.mu.Unlock()
		return true
	case apierrors.IsNotFound(err), apierrors.IsConflict(err), p.agent.ctx.Err() != nil:
		return true
	default:
		log.Printf("report status of %s/%s: %v", pod.Namespace, pod.Name, err)
		return false
	}
}

// statusPatch compares with what the API server answered last, not with the
// watch: a lagging watch would hide a change back to an earlier value.
func statusPatch(uid types.UID, old, wanted v1.PodStatus) ([]byte, error) {
	before, err := json.Marshal(v1.Pod{Status: old})
	if err != nil {
		return nil, err
	}
	// The uid makes the server refuse the patch for a namesake.
	after, err := json.Marshal(v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid}, Status: wanted})
	if err != nil {
		return nil, err
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(before, after, v1.Pod{})
	if err != nil || string(patch) == fmt.Sprintf(`{"metadata":{"uid":%q}}`, uid) {
		return nil, err
	}
	return patch, nil
}

// buildStatus needs p.mu.
func (p *podRunner) buildStatus() v1.PodStatus {
	status := *p.reported.DeepCopy()
	status.ObservedGeneration = p.pod.Generation
	status.HostIP = "127.0.0.1"
	status.HostIPs = []v1.HostIP{{IP: status.HostIP}}
	status.PodIP = p.agent.podIP
	status.PodIPs = []v1.PodIP{{IP: status.PodIP}}
	if status.StartTime == nil {
		now := metav1.Now()
		status.StartTime = &now
	}
	status.InitContainerStatuses = containerStatuses(p.init)
	status.ContainerStatuses = containerStatuses(p.main)
	if !podutil.IsPodPhaseTerminal(status.Phase) {
		status.Phase = p.phase()
	}
	p.setConditions(&status)
	return status
}

func containerStatuses(containers []*container) []v1.ContainerStatus {
	var statuses []v1.ContainerStatus
	for _, c := range containers {
		statuses = append(statuses, *c.status.DeepCopy())
	}
	return statuses
}

// phase follows the rules of a kubelet; it needs p.mu.
func (p *podRunner) phase() v1.PodPhase {
	policy := p.pod.Spec.RestartPolicy
	stopping := p.starting.Err() != nil
	if !p.initialized {
		for _, c := range p.init {
			if t := c.status.State.Terminated; t != nil && t.ExitCode != 0 && policy == v1.RestartPolicyNever {
				return v1.PodFailed
			}
		}
		return v1.PodPending
	}
	var running, neverStarted, failed, succeeded int
	for _, c := range p.main {
		switch state := c.status.State; {
		case state.Running != nil:
			running++
		case state.Terminated != nil && state.Terminated.ExitCode == 0:
			succeeded++
		case state.Terminated != nil:
			failed++
		case c.status.LastTerminationState.Terminated == nil:
			neverStarted++
		default:
			running++ // waits for its restart
		}
	}
	switch {
	case neverStarted > 0:
		return v1.PodPending
	case running > 0:
		return v1.PodRunning
	case policy == v1.RestartPolicyAlways && !stopping:
		return v1.PodRunning
	case failed > 0 && (policy == v1.RestartPolicyNever || stopping):
		return v1.PodFailed
	case failed > 0:
		return v1.PodRunning
	}
	return v1.PodSucceeded
}

func (p *podRunner) setConditions(status *v1.PodStatus) {
	var unready []string
	for _, c := range append(p.sidecars(), p.main...) {
		if !c.status.Ready {
			unready = append(unready, c.spec.Name)
		}
	}
	reason, message := "", ""
	switch {
	case status.Phase == v1.PodSucceeded:
		reason = "PodCompleted"
	case len(unready) > 0:
		reason = "ContainersNotReady"
		message = fmt.Sprintf("containers with unready status: [%s]", strings.Join(unready, " "))
	}
	containersReady := reason == ""
	ready := containersReady
	if gate := p.closedReadinessGate(); ready && gate != "" {
		ready, reason = false, "ReadinessGatesNotReady"
		message = fmt.Sprintf("corresponding condition of pod readiness gate %q is not true", gate)
	}
	p.setCondition(status, v1.PodReadyToStartContainers, p.volumesReady, "", "")
	p.setCondition(status, v1.PodInitialized, p.initialized, notInitialized(p.initialized), "")
	p.setCondition(status, v1.ContainersReady, containersReady, reasonUnless(containersReady, reason), message)
	p.setCondition(status, v1.PodReady, ready, reason, message)
}

func notInitialized(initialized bool) string {
	return reasonUnless(initialized, "ContainersNotInitialized")
}

func reasonUnless(good bool, reason string) string {
	if good {
		return ""
	}
	return reason
}

func (p *podRunner) sidecars() []*container {
	var sidecars []*container
	for _, c := range p.init {
		if podutil.IsRestartableInitContainer(c.spec) {
			sidecars = append(sidecars, c)
		}
	}
	return sidecars
}

func (p *podRunner) closedReadinessGate() v1.PodConditionType {
	for _, gate := range p.pod.Spec.ReadinessGates {
		_, condition := podutil.GetPodCondition(&p.pod.Status, gate.ConditionType)
		if condition == nil || condition.Status != v1.ConditionTrue {
			return gate.ConditionType
		}
	}
	return ""
}

// setCondition keeps the transition time unless the condition flips.
func (p *podRunner) setCondition(status *v1.PodStatus, kind v1.PodConditionType, good bool, reason, message string) {
	condition := v1.PodCondition{
		Type: kind, Status: v1.ConditionFalse, Reason: reason, Message: message,
		ObservedGeneration: p.pod.Generation,
	}
	if good {
		condition.Status = v1.ConditionTrue
	}
	podutil.UpdatePodCondition(status, &condition)
}
