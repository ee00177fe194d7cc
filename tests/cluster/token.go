package main

import (
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
)

// podToken is a service account token in a projected volume.
type podToken struct {
	value   string
	halfWay time.Time
}

func newPodToken(answer *authenticationv1.TokenRequest) *podToken {
	life := time.Until(answer.Status.ExpirationTimestamp.Time)
	return &podToken{value: answer.Status.Token, halfWay: time.Now().Add(life / 2)}
}

func (t *podToken) halfLifeOver() bool { return time.Now().After(t.halfWay) }
