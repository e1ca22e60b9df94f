-- KEYS[1] key logs
-- ARGV[1] prefix of other keys
-- Returns the approximate number of idempotency keys, from the lengths of their logs. Of more than 1000 logs, 1000 are counted.
local logs = redis.call('SRANDMEMBER', KEYS[1], 1000)
local bytes = 0
for _, log in ipairs(logs) do
  bytes = bytes + redis.call('STRLEN', ARGV[1] .. 'idemlog:' .. log)
end
if bytes == 0 then
  return {0}
end
return {math.floor(bytes / 16 * redis.call('SCARD', KEYS[1]) / #logs + 0.5)}
