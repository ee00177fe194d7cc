package main

// The command lines of the control plane. All of it listens on loopback only
// and trusts the cluster's own authority.

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
`

// folder is where a cluster keeps everything.
type folder string

func (f folder) path(parts ...string) string {
	return filepath.Join(append([]string{string(f)}, parts...)...)
}

func (f folder) pki(name string) string { return f.path("pki", name) }

type endpoints struct {
	etcd, etcdPeer, apiserver, kubelet int
}

func (e endpoints) server() string { return fmt.Sprintf("https://127.0.0.1:%d", e.apiserver) }

// identities maps the name of a certificate and kubeconfig to its subject. The
// parts of the cluster act as administrators; users under test bring their own
// service accounts, for which RBAC is enforced.
var identities = map[string]pkix.Name{
	"apiserver":               {CommonName: "kube-apiserver", Organization: []string{"system:masters"}},
	"admin":                   {CommonName: "admin", Organization: []string{"system:masters"}},
	"kube-controller-manager": {CommonName: "system:kube-controller-manager", Organization: []string{"system:masters"}},
	"kube-scheduler":          {CommonName: "system:kube-scheduler"},
	"agent":                   {CommonName: "system:node-agent", Organization: []string{"system:masters"}},
}

// writeConfiguration makes keys, certificates, kubeconfigs and the audit policy.
func writeConfiguration(dir folder, at endpoints, nodeAddress string) error {
	if err := os.MkdirAll(dir.path("pki"), 0o700); err != nil {
		return err
	}
	addresses := []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP("10.96.0.1")}
	if nodeAddress != "" {
		addresses = append(addresses, net.ParseIP(nodeAddress))
	}
	ca, err := newAuthority(dir.path("pki"), addresses)
	if err != nil {
		return err
	}
	for name, subject := range identities {
		if err := ca.issue(name, subject); err != nil {
			return err
		}
		if err := writeKubeconfig(dir, at, name); err != nil {
			return err
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if err := writeKey(dir.pki("service-accounts.key"), key); err != nil {
		return err
	}
	return os.WriteFile(dir.path("audit-policy.yaml"), []byte(auditPolicy), 0o600)
}

// kubeconfigPath is DIR/kubeconfig for the user, DIR/pki/NAME.kubeconfig for a part.
func kubeconfigPath(dir folder, name string) string {
	if name == "admin" {
		return dir.path("kubeconfig")
	}
	return dir.pki(name + ".kubeconfig")
}

func writeKubeconfig(dir folder, at endpoints, name string) error {
	config := clientcmdapi.NewConfig()
	ca, err := os.ReadFile(dir.pki("ca.crt"))
	if err != nil {
		return err
	}
	certificate, err := os.ReadFile(dir.pki(name + ".crt"))
	if err != nil {
		return err
	}
	key, err := os.ReadFile(dir.pki(name + ".key"))
	if err != nil {
		return err
	}
	config.Clusters["local"] = &clientcmdapi.Cluster{Server: at.server(), CertificateAuthorityData: ca}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{ClientCertificateData: certificate, ClientKeyData: key}
	config.Contexts["specdecode-local"] = &clientcmdapi.Context{Cluster: "local", AuthInfo: name, Namespace: "default"}
	config.CurrentContext = "specdecode-local"
	return clientcmd.WriteToFile(*config, kubeconfigPath(dir, name))
}

func etcdArguments(dir folder, at endpoints) []string {
	client := fmt.Sprintf("http://127.0.0.1:%d", at.etcd)
	peer := fmt.Sprintf("http://127.0.0.1:%d", at.etcdPeer)
	return []string{
		"etcd",
		"--name=local",
		"--data-dir=" + dir.path("etcd"),
		"--listen-client-urls=" + client,
		"--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer,
		"--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=local=" + peer,
		"--log-level=warn",
		// The data is thrown away with the cluster.
		"--unsafe-no-fsync",
	}
}

func apiserverArguments(dir folder, at endpoints) []string {
	return []string{
		"kube-apiserver",
		fmt.Sprintf("--etcd-servers=http://127.0.0.1:%d", at.etcd),
		fmt.Sprintf("--secure-port=%d", at.apiserver),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		// A loopback address is refused as an endpoint of the "kubernetes" Service.
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/16",
		"--tls-cert-file=" + dir.pki("apiserver.crt"),
		"--tls-private-key-file=" + dir.pki("apiserver.key"),
		"--client-ca-file=" + dir.pki("ca.crt"),
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + dir.pki("service-accounts.key"),
		"--service-account-signing-key-file=" + dir.pki("service-accounts.key"),
		"--kubelet-certificate-authority=" + dir.pki("ca.crt"),
		"--kubelet-client-certificate=" + dir.pki("apiserver.crt"),
		"--kubelet-client-key=" + dir.pki("apiserver.key"),
		"--kubelet-preferred-address-types=InternalIP",
		"--audit-policy-file=" + dir.path("audit-policy.yaml"),
		"--audit-log-path=" + dir.path("audit.log"),
		"--audit-log-mode=blocking",
		"--audit-log-maxbackup=2",
		"--profiling=false",
	}
}

func managerArguments(dir folder, _ endpoints) []string {
	return []string{
		"kube-controller-manager",
		"--kubeconfig=" + kubeconfigPath(dir, "kube-controller-manager"),
		"--leader-elect=false",
		"--secure-port=0",
		"--root-ca-file=" + dir.pki("ca.crt"),
		"--service-account-private-key-file=" + dir.pki("service-accounts.key"),
		// With the default limits the default ServiceAccount takes 9 s to appear.
		"--kube-api-qps=1000",
		"--kube-api-burst=1000",
		"--profiling=false",
	}
}

func schedulerArguments(dir folder, _ endpoints) []string {
	return []string{
		"kube-scheduler",
		"--kubeconfig=" + kubeconfigPath(dir, "kube-scheduler"),
		"--authentication-kubeconfig=" + kubeconfigPath(dir, "kube-scheduler"),
		"--authorization-kubeconfig=" + kubeconfigPath(dir, "kube-scheduler"),
		"--leader-elect=false",
		"--secure-port=0",
		"--profiling=false",
	}
}
