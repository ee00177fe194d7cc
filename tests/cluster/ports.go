package main

import (
	"fmt"
	"math/rand/v2"
	"net"
)

// The range lies below the kernel's ephemeral ports: an engine that binds its
// port 20 s after it was given must not find an outgoing connection on it.
const firstPort, lastPort = 20000, 29999

// reservedPort is a port that no other cluster on this machine will hand out.
type reservedPort struct {
	number int
	claim  net.Listener
}

// reservePort picks a free port. An abstract Unix socket of that name is held
// as the claim: it works across processes and vanishes with its holder.
func reservePort() (*reservedPort, error) {
	for range 1000 {
		port, err := claimPort(firstPort + rand.IntN(lastPort-firstPort+1))
		if err == nil {
			return port, nil
		}
	}
	return nil, fmt.Errorf("no free port between %d and %d", firstPort, lastPort)
}

func claimPort(number int) (*reservedPort, error) {
	claim, err := net.Listen("unix", fmt.Sprintf("@specdecode-cluster-port-%d", number))
	if err != nil {
		return nil, err
	}
	// Binding all addresses shows whether anybody uses the port on any of them.
	probe, err := net.Listen("tcp", fmt.Sprintf(":%d", number))
	if err != nil {
		claim.Close()
		return nil, err
	}
	probe.Close()
	return &reservedPort{number: number, claim: claim}, nil
}

func (p *reservedPort) release() { p.claim.Close() }

// machineAddress is the address that pods report: the one that leads out of
// this machine, else any that is not loopback (the API server refuses loopback
// in EndpointSlices), else one reserved for documentation.
func machineAddress() string {
	// "Connecting" UDP sends nothing; it only asks the routing table.
	if connection, err := net.Dial("udp4", "192.0.2.1:9"); err == nil {
		defer connection.Close()
		if ip := connection.LocalAddr().(*net.UDPAddr).IP; !ip.IsLoopback() {
			return ip.String()
		}
	}
	addresses, _ := net.InterfaceAddrs()
	for _, address := range addresses {
		network, ok := address.(*net.IPNet)
		if ok && network.IP.To4() != nil && network.IP.IsGlobalUnicast() {
			return network.IP.String()
		}
	}
	return "192.0.2.1"
}
