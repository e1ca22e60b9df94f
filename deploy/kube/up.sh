#!/usr/bin/env bash
# Runs the control plane of main.go with two fake nodes by kwok until it is interrupted. All ports are on the loopback interface.
#
#   up.sh FOLDER ETCD PEER API CONTROLLERS SCHEDULER KWOK
#
# FOLDER gets state, logs and `kubeconfig`; the file `ready` exists when the nodes are ready. The others are free ports.
#
# `cargo xtask kube up` and the tests of the Helm chart run it, with `kube` (main.go) and `kwok` in the PATH. Needs openssl.
# Pods run nothing: there are no probes, no traffic and no metrics, and Jobs succeed. An APIService can add metrics, by which the autoscaler
# of the control plane then scales.
set -euo pipefail

dir=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$dir"
rm -f ready
etcd=$2 peer=$3 api=$4 controllers=$5 scheduler=$6 kwok=$7
token=$(openssl rand -hex 16)

certificate() { # NAME SUBJECT EXTENSION: a key and a certificate of the CA
    openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 7 -out "$1.crt" -extfile <(echo "$3") 2>/dev/null
}
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 7 -subj /CN=ca 2>/dev/null
certificate front-proxy /CN=front-proxy "extendedKeyUsage=clientAuth"
certificate server /CN=kube-apiserver "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default"
openssl genrsa -out service-accounts.key 2048 2>/dev/null
echo "$token,admin,admin,system:masters" >tokens
cat >kubeconfig <<YAML
apiVersion: v1
kind: Config
clusters: [{ name: kube, cluster: { server: "https://127.0.0.1:$api", certificate-authority: $dir/ca.crt } }]
users: [{ name: admin, user: { token: $token } }]
contexts: [{ name: kube, context: { cluster: kube, user: admin } }]
current-context: kube
YAML

trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 0' INT TERM
# A program ends with this script, even if it is killed.
run() { exec setpriv --pdeathsig KILL "$@"; }
run kube etcd --data-dir etcd --listen-client-urls "http://127.0.0.1:$etcd" --advertise-client-urls "http://127.0.0.1:$etcd" \
    --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
    --initial-cluster "default=http://127.0.0.1:$peer" --unsafe-no-fsync >etcd.log 2>&1 &
run kube kube-apiserver --etcd-servers "http://127.0.0.1:$etcd" --bind-address 127.0.0.1 --secure-port "$api" \
    --tls-cert-file server.crt --tls-private-key-file server.key --token-auth-file tokens --authorization-mode RBAC \
    --service-account-issuer https://kubernetes.default --service-account-key-file service-accounts.key \
    --service-account-signing-key-file service-accounts.key --service-cluster-ip-range 10.96.0.0/16 \
    --proxy-client-cert-file front-proxy.crt --proxy-client-key-file front-proxy.key --requestheader-client-ca-file ca.crt \
    --requestheader-allowed-names front-proxy --requestheader-username-headers X-Remote-User \
    --requestheader-group-headers X-Remote-Group --requestheader-extra-headers-prefix X-Remote-Extra- >apiserver.log 2>&1 &
until kube kubectl --kubeconfig kubeconfig get --raw /readyz >/dev/null 2>&1; do
    kill -0 $! || { tail apiserver.log >&2; exit 1; }
    sleep 0.5
done
run kube kube-controller-manager --kubeconfig kubeconfig --leader-elect=false --bind-address 127.0.0.1 --secure-port "$controllers" \
    --cert-dir certificates --use-service-account-credentials --service-account-private-key-file service-accounts.key \
    --root-ca-file ca.crt --horizontal-pod-autoscaler-sync-period 1s >controllers.log 2>&1 &
run kube kube-scheduler --kubeconfig kubeconfig --leader-elect=false --bind-address 127.0.0.1 --secure-port "$scheduler" \
    --cert-dir certificates >scheduler.log 2>&1 &
# Without leases, nodes become NotReady after about 50 s.
run kwok --kubeconfig kubeconfig --manage-all-nodes --node-lease-duration-seconds 40 --server-address "127.0.0.1:$kwok" >kwok.log 2>&1 &
for zone in a b; do
    kube kubectl --kubeconfig kubeconfig apply --filename - >/dev/null <<YAML
apiVersion: v1
kind: Node
metadata:
  name: node-$zone
  labels: { kubernetes.io/hostname: node-$zone, kubernetes.io/os: linux, topology.kubernetes.io/zone: $zone }
  annotations: { kwok.x-k8s.io/node: fake }
status:
  allocatable: { cpu: "32", memory: 256Gi, pods: "110" }
  capacity: { cpu: "32", memory: 256Gi, pods: "110" }
YAML
done
kube kubectl --kubeconfig kubeconfig wait --for=condition=Ready --timeout=60s node --all >/dev/null
touch ready
echo "KUBECONFIG=$dir/kubeconfig"
wait -n
echo "a process of the control plane ended; see the logs in $dir" >&2
exit 1
