package main

// What is left of a container that has ended: its termination message, and
// whether the kernel killed it for memory.

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
)

// The limits of a kubelet.
const (
	maxMessageBytes  = 4096
	maxFallbackBytes = 2048
	maxFallbackLines = 80
)

// terminationMessage is what the container wrote into its file, else, when the
// policy says so and it failed, the end of its log.
func terminationMessage(run *instance, policy v1.TerminationMessagePolicy, code int32) string {
	content, _ := os.ReadFile(run.messagePath)
	if len(content) > maxMessageBytes {
		content = content[:maxMessageBytes]
	}
	if len(content) == 0 && code != 0 && policy == v1.TerminationMessageFallbackToLogsOnError {
		content = readTail(run.logPath, maxFallbackBytes, maxFallbackLines)
	}
	return strings.ToValidUTF8(string(content), "\uFFFD")
}

// readTail returns at most that many bytes and lines from the end of a file; a
// limit below zero is none.
func readTail(path string, maxBytes, maxLines int) []byte {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	if maxBytes >= 0 && len(content) > maxBytes {
		content = content[len(content)-maxBytes:]
	}
	return lastLines(content, maxLines)
}

func lastLines(content []byte, count int) []byte {
	if count < 0 {
		return content
	}
	end := len(content)
	if end > 0 && content[end-1] == '\n' {
		end--
	}
	for position := end; count > 0; count-- {
		position = bytes.LastIndexByte(content[:position], '\n')
		if position < 0 {
			return content
		}
		if count == 1 {
			return content[position+1:]
		}
	}
	return nil
}

// earlierOOMKills is the kernel's count of processes killed for lack of memory,
// as it was one to two seconds ago.
var earlierOOMKills atomic.Int64

func watchOOMKills(ctx context.Context) {
	earlierOOMKills.Store(readOOMKills())
	for ctx.Err() == nil {
		count := readOOMKills()
		time.Sleep(time.Second)
		earlierOOMKills.Store(count)
	}
}

func readOOMKills() int64 {
	content, _ := os.ReadFile("/proc/vmstat")
	_, rest, found := strings.Cut(string(content), "\noom_kill ")
	if !found {
		return 0
	}
	number, _, _ := strings.Cut(rest, "\n")
	count, _ := strconv.ParseInt(number, 10, 64)
	return count
}

// kernelKilledForMemory tells the kernel's SIGKILL of just now from anybody
// else's: without cgroups only this machine-wide counter shows it.
func kernelKilledForMemory() bool { return readOOMKills() > earlierOOMKills.Load() }
