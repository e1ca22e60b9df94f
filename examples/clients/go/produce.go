// Writes the numbers 1 to 30 to a topic. To run it, in this directory: go run .
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	client, err := kgo.NewClient(kgo.SeedBrokers("localhost:9092"))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	for number := 1; number <= 30; number++ {
		record := &kgo.Record{
			Topic:   "greetings",
			Key:     []byte(fmt.Sprintf("key-%d", number)),
			Value:   []byte(fmt.Sprintf(`{"number": %d}`, number)),
			Headers: []kgo.RecordHeader{{Key: "tenant", Value: []byte("b")}},
		}
		if err := client.ProduceSync(context.Background(), record).FirstErr(); err != nil {
			log.Fatal(err)
		}
	}
}
