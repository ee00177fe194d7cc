package main

// An "image" is a program on this machine, looked up in a JSON file that may
// change at any time: {"IMAGE": {"entrypoint": ["/abs/prog"], "env": {}, "workdir": ""}}.

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
)

type image struct {
	Entrypoint []string          `json:"entrypoint"`
	Env        map[string]string `json:"env"`
	Workdir    string            `json:"workdir"`
}

// lookupImage reads the file anew each time: it is small and starts are rare.
func lookupImage(path, name string) (*image, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read images: %w", err)
	}
	images := map[string]*image{}
	if err := json.Unmarshal(content, &images); err != nil {
		return nil, fmt.Errorf("read images from %s: %w", path, err)
	}
	if found, ok := images[name]; ok && found != nil {
		return found, nil
	}
	return nil, fmt.Errorf("failed to pull image %q: not found: add it to %s", name, path)
}

// id stands for an image digest: it changes when the entry changes.
func (i *image) id(name string) string {
	content, _ := json.Marshal(i)
	return fmt.Sprintf("%s@sha256:%x", name, sha256.Sum256(content))
}
